"""Sampler, state and snapshots by themselves, in a loop without a launcher: run it with python.

Interrupt it and run it again: it continues from its newest snapshot, also in the middle of an epoch.
"""

import torch
from torch import nn

from elastic_train import SnapshotStore, StepSampler, TrainState

inputs = torch.linspace(-1, 1, 1000).unsqueeze(1)
targets = inputs.square()


def main() -> None:
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    state = TrainState(model, torch.optim.Adam(model.parameters()), length=len(inputs), global_batch_size=64, epochs=30)
    store = SnapshotStore("parts_alone_snapshots")
    if found := store.load_newest():
        state.load_state_dict(found[1])
    while not state.is_finished:
        sampler = StepSampler(
            length=state.length, seed=0, epoch=state.epoch, samples_done=state.samples_done, steps_done=state.step,
            global_batch_size=64, rank=0, world_size=1, virtual_ranks=None, micro_batch_size=None, max_steps=None,
        )  # fmt: skip
        for micro_batch in sampler:
            indices = torch.from_numpy(micro_batch.indices)
            loss = nn.functional.mse_loss(model(inputs[indices]), targets[indices])
            state.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            state.optimizer.step()
            state.commit(loss.item())
            if state.step % 50 == 0:
                store.save_in_background(state.state_dict(), step=state.step)
    store.wait()
    print(f"step {state.step}: loss {state.last_loss:.5f}")


if __name__ == "__main__":
    main()
