# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""One measurement of PyTorch: plain SGD ("sgd"), Opacus ("hooks" or "ghost"), or FastDP."""

import importlib
import os
import warnings

import protocol

warnings.filterwarnings("ignore")

# By name: these belong to an environment of their own and are no dependency of dice_tf.
torch = importlib.import_module("torch")
opacus = importlib.import_module("opacus")
opacus_layers = importlib.import_module("opacus.layers")
nn = torch.nn


class EncoderBlock(nn.Module):
    """The block of `models.py`, with the attention layer that Opacus can differentiate."""

    def __init__(self, width, hidden):
        super().__init__()
        self.attention = opacus_layers.DPMultiheadAttention(width, 4, batch_first=True)
        self.after_attention = nn.LayerNorm(width, eps=1e-6)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)
        )
        self.after_feed_forward = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x):
        x = self.after_attention(x + self.attention(x, x, x, need_weights=False)[0])
        return self.after_feed_forward(x + self.feed_forward(x))


class Encoder(nn.Module):
    """Two blocks and a head on what `embed` makes of the inputs."""

    def __init__(self, embed, width, hidden):
        super().__init__()
        self.embed = embed
        self.blocks = nn.Sequential(EncoderBlock(width, hidden), EncoderBlock(width, hidden))
        self.head = nn.Linear(width, protocol.CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)).mean(1))


class Patches(nn.Module):
    """8 x 8 patches with learned positions, as an embedding, for which Opacus has a rule."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 64, 4, stride=4)
        self.positions = nn.Embedding(64, 64)

    def forward(self, x):
        tokens = self.convolution(x).flatten(2).transpose(1, 2)
        # Every example needs its own ids: broadcast ones have no batch axis to clip along.
        return tokens + self.positions(torch.arange(64).repeat(len(x), 1))


class LastState(nn.Module):
    """The last state of an LSTM: PyTorch's own, or the one that Opacus can differentiate."""

    def __init__(self, private):
        super().__init__()
        kind = opacus_layers.DPLSTM if private else nn.LSTM
        self.lstm = kind(128, 128, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


def build(name, private):
    """Builds a model of `models.py`."""
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
            nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, protocol.CLASSES),
        )  # fmt: skip
    if name == "mlp":
        return nn.Sequential(
            nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
            nn.Linear(1024, protocol.CLASSES),
        )  # fmt: skip
    if name == "lstm":
        embedding = nn.Embedding(protocol.TOKENS, 128)
        return nn.Sequential(embedding, LastState(private), nn.Linear(128, protocol.CLASSES))
    if name == "transformer":
        return Encoder(nn.Embedding(protocol.TOKENS, 128), 128, 512)
    return Encoder(Patches(), 64, 256)


_ORIGINS = {
    "cnn": ["0.bias"],
    "mlp": ["0.bias"],
    "transformer": ["embed"],
    "vit": ["embed.convolution.bias", "embed.positions"],
}


def main():
    """Measures what the command line specifies."""
    cell = protocol.specification()
    batch, way = cell["batch"], cell["way"]
    torch.set_num_threads(os.cpu_count())
    model = build(cell["model"], private=way != "sgd").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss = nn.CrossEntropyLoss()

    x, y = protocol.make_examples(cell["model"], batch)
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2).copy()
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()
    x = x if x.is_floating_point() else x.long()
    versions = {"torch": torch.__version__, "opacus": opacus.__version__}
    if way == "fastdp":
        fastdp = importlib.import_module("fastDP")
        # Clipping like everyone here, in FastDP's fastest setting: its hooks start at the
        # parameter that is named as the origin.
        fastdp.PrivacyEngine(
            model, batch_size=batch, sample_size=8 * batch, num_steps=1000,
            noise_multiplier=1.0, max_grad_norm=1.0, clipping_fn="Abadi",
            clipping_mode="MixOpt", clipping_style="all-layer",
            origin_params=_ORIGINS[cell["model"]],
        ).attach(optimizer)  # fmt: skip
        versions["fastDP"] = fastdp.__version__
    elif way != "sgd":
        # The loader only tells Opacus the batch size; no sampling is timed anywhere here.
        data = torch.utils.data.TensorDataset(torch.zeros(8 * batch, 1), torch.zeros(8 * batch))
        private = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=torch.utils.data.DataLoader(data, batch_size=batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=way,
            **({"criterion": loss} if way == "ghost" else {}),
        )
        model, optimizer = private[:2]
        loss = private[2] if way == "ghost" else loss

    def step(x, y):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    run = protocol.loop_run(step, lambda: None, x, y, batch)
    result = protocol.time_alone(*run, cell)
    protocol.report({**result, "versions": versions})


if __name__ == "__main__":
    main()
