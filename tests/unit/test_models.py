"""Models by name, and the form of the images that they are given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elastic_train.errors import UsageError
from elastic_train.training.models import InputForm, build_model, check_model_name, fit_images, input_form


def outputs(name: str, channels: int, image_size: int, num_samples: int = 1, classes: int = 7) -> torch.Tensor:
    """One forward pass in training mode."""
    torch.manual_seed(0)
    model = build_model(name, channels=channels, classes=classes, image_size=image_size).train()
    images = torch.randn(num_samples, channels, image_size, image_size)
    result = model(fit_images(images, input_form(name, channels, image_size)))
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize("image_size", [4, 8, 9, 28, 32, 33, 64])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_own_models_take_one_sample_of_any_size(name: str, channels: int, image_size: int) -> None:
    assert outputs(name, channels, image_size).shape == (1, 7)


def test_the_seed_alone_decides_the_weights() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build_model("cnn", channels=1, classes=10, image_size=8).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["0.weight"], other["0.weight"])


@pytest.mark.parametrize("name", ["resnet18", "googlenet"])
def test_torchvision_models_take_one_small_sample(name: str) -> None:
    assert outputs(name, 1, 8).shape == (1, 7)


@pytest.mark.slow
def test_all_but_the_largest_torchvision_classifiers_take_one_small_sample() -> None:
    from torchvision import models  # type: ignore[import-untyped]

    for name in models.list_models(module=models):
        if not name.startswith("vit_h") and not name.endswith(("128gf", "32gf", "16gf", "_l")):
            assert outputs(name, 1, 28).shape == (1, 7), name


class TestResNet:
    def test_large_images_give_torchvisions_own_model(self) -> None:
        from torchvision import models

        ours = build_model("resnet18", channels=3, classes=7, image_size=65)
        theirs = models.resnet18(num_classes=7)
        theirs.load_state_dict(ours.state_dict(), strict=True)
        images = torch.randn(2, 3, 65, 65)
        assert torch.equal(ours.eval()(images), theirs.eval()(images))

    def test_small_images_get_a_stem_that_keeps_their_size(self) -> None:
        from torchvision import models

        ours = build_model("resnet18", channels=3, classes=7, image_size=32)
        theirs = models.resnet18(num_classes=7)
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        theirs.conv1, theirs.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        theirs.load_state_dict(ours.state_dict(), strict=True)
        maps: list[torch.Size] = []
        ours.get_submodule("layer1").register_forward_hook(lambda _m, _i, output: maps.append(output.shape))
        ours(torch.randn(1, 3, 32, 32))
        assert maps == [torch.Size([1, 64, 32, 32])]


def test_images_that_fit_are_left_alone() -> None:
    images = torch.randn(2, 3, 32, 32)
    assert fit_images(images, InputForm(3, 32)) is images


def test_one_channel_is_repeated() -> None:
    fitted = fit_images(torch.randn(2, 1, 32, 32), InputForm(3, 32))
    assert torch.equal(fitted[:, 0], fitted[:, 2])


@pytest.mark.parametrize(
    ("name", "hint"),
    [("resnet81", "did you mean resnet"), ("cn", "did you mean cnn"), ("qqqq", "torchvision classifier")],
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=f"--model {name}: no such model; .*{hint}"):
        check_model_name(name)


def test_torchvision_models_refuse_odd_channels() -> None:
    with pytest.raises(UsageError, match="1 or 3 channels, but the data has 4"):
        build_model("resnet18", channels=4, classes=10, image_size=32)
