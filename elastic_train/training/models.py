"""Image classifiers by name: two small ones of our own, and all of torchvision's.

A torchvision model is not wrapped, so its `state_dict` has torchvision's names. `fit_images` gives a batch the channels
and the size that the model needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import torch.nn.functional as F
from torch import Tensor, nn

from elastic_train.errors import UsageError

OWN_MODELS = ("cnn", "mlp")

CIFAR_STEM_UP_TO = 64
"""pixels; for images up to this size a ResNet does not shrink them fourfold before its first block"""

_RESNETS = ("resnet", "resnext", "wide_resnet")
_FIXED_SIZE = {"vit_": 224, "maxvit_": 224}
# BatchNorm needs more than one value per channel, also for a batch of one sample. torchvision's models shrink images
# 32-fold, so 64 pixels leave 2 x 2; Inception does not pad, and needs more.
_LEAST_SIZE = {"inception_v3": 128}
_USUAL_LEAST_SIZE = 64
_RESNET_LEAST_SIZE = 32
_CNN_LEAST_SIZE = 8
# Without BatchNorm these need a small learning rate with SGD.
_WITHOUT_BATCH_NORM = ("alexnet", "squeezenet")
TRANSFORMER_LIKE = ("vit_", "swin_", "maxvit_", "convnext_")


@dataclass(frozen=True)
class InputForm:
    """The form of the images that a model takes."""

    channels: int
    image_size: int


def input_form(name: str, channels: int, image_size: int) -> InputForm:
    """Return the form in which the model `name` takes images of `channels` and `image_size`."""
    if name == "mlp":
        return InputForm(channels, image_size)
    if name == "cnn":
        return InputForm(channels, max(image_size, _CNN_LEAST_SIZE))
    for prefix, size in _FIXED_SIZE.items():
        if name.startswith(prefix):
            return InputForm(3, size)
    least = _RESNET_LEAST_SIZE if name.startswith(_RESNETS) else _LEAST_SIZE.get(name, _USUAL_LEAST_SIZE)
    return InputForm(3, max(image_size, least))


def fit_images(images: Tensor, form: InputForm) -> Tensor:
    """Return `images` (sample, channel, height, width) in `form`: a single channel repeated, and resized if needed."""
    if images.shape[1] == 1 and form.channels != 1:
        images = images.expand(-1, form.channels, -1, -1)
    if images.shape[-2:] != (form.image_size, form.image_size):
        size = (form.image_size, form.image_size)
        images = F.interpolate(images, size=size, mode="bilinear", align_corners=False)
    return images


def check_model_name(name: str) -> None:
    """Raises: UsageError: there is no model of that name; the message has close ones."""
    if name in OWN_MODELS:
        return
    from torchvision import models  # type: ignore[import-untyped]

    names = [*OWN_MODELS, *models.list_models(module=models)]
    if name not in names:
        close = get_close_matches(name, names, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "choose cnn, mlp or a torchvision classifier"
        raise UsageError(f"--model {name}: no such model; {hint}")


def build_model(name: str, *, channels: int, classes: int, image_size: int) -> nn.Module:
    """Return a newly initialised model for data of `channels` and `image_size`; seed torch before the call.

    It takes images in the form of `input_form`. The `state_dict` of a torchvision model loads with `strict=True` into
    torchvision's own model of `classes` classes. A ResNet for images up to `CIFAR_STEM_UP_TO` pixels is an exception:
    it has the same keys, but a smaller first convolution.
    Raises: UsageError: unknown name, or the model cannot take that number of channels.
    """
    check_model_name(name)
    form = input_form(name, channels, image_size)
    if name == "mlp":
        return mlp(channels, classes, image_size)
    if name == "cnn":
        return cnn(channels, classes, form.image_size)
    if channels not in (1, 3):
        raise UsageError(f"--model {name} takes images of 1 or 3 channels, but the data has {channels}")
    return _torchvision_model(name, classes, image_size)


def mlp(channels: int, classes: int, image_size: int) -> nn.Sequential:
    """Return a perceptron with two hidden layers and no BatchNorm."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * image_size**2, 256),
        nn.ReLU(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def cnn(channels: int, classes: int, image_size: int) -> nn.Sequential:
    """Return a small convolutional net with BatchNorm and dropout, for images from 8 pixels.

    It uses average pooling with fixed windows: unlike max pooling and adaptive pooling, its backward pass is
    deterministic on every device. BatchNorm has maps larger than 1 x 1 only, so a batch of one sample works.
    """
    layers = [*_convolution(channels, 32), *_convolution(32, 32), nn.AvgPool2d(2), *_convolution(32, 64)]
    width, size = 64, image_size // 2
    while size > 8:
        layers += [nn.AvgPool2d(2), *_convolution(width, 128)]
        width, size = 128, size // 2
    layers += [nn.AvgPool2d(size // 2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(4 * width, classes)]
    return nn.Sequential(*layers)


def _convolution(in_channels: int, out_channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    ]


def _torchvision_model(name: str, classes: int, image_size: int) -> nn.Module:
    from torchvision import models

    # These two return a tuple in training because of auxiliary classifiers; without them a tensor, as other models do.
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    if isinstance(model, models.ResNet) and image_size <= CIFAR_STEM_UP_TO:
        # The first layers of the literature's CIFAR experiments: the usual ones would reduce 32 pixels to 1 x 1.
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def learning_rate(name: str, optimizer: str) -> float:
    """Return a learning rate for SGD with momentum 0.9, or for AdamW, with about 64 samples per step."""
    if optimizer != "sgd":
        return 2e-3 if name in OWN_MODELS else 5e-4
    is_plain_vgg = name.startswith("vgg") and not name.endswith("_bn")
    return 0.01 if is_plain_vgg or name.startswith(_WITHOUT_BATCH_NORM) else 0.05
