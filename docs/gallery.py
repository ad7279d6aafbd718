"""Draw the pictures of the gallery: run the examples, and save `docs/img/*.png`.

    python docs/gallery.py [vae gan pinn curriculum finetune]

Each takes as long as its example. It needs Matplotlib.
"""

import pathlib
import sys
import tomllib

import jax.random as jr
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image


ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

# Okabe and Ito's colors, which are told apart with any color vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"

STYLE: dict = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
}


def band(axes, steps, curves, color, label, **how):
    """The mean of several runs, and from the lowest to the highest of them."""
    curves = np.asarray(curves)
    axes.fill_between(
        steps, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.25, lw=0
    )
    axes.plot(steps, curves.mean(axis=0), color=color, label=label, **how)


def draw_vae(vae, config):
    """The weight and the size of the KL term, by schedule."""
    runs = vae.experiment(config, progress=False)
    figure, (top, low) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    colors = dict(zip(runs, (RED, GREEN, BLUE), strict=True))
    steps = np.arange(config["num_steps"])
    for name, found in runs.items():
        results = [result for result, _ in found]
        units, loss = (np.mean([m[k] for _, m in found]) for k in ("units", "loss"))
        weight = vae.weight_of_kl(name, config)
        first = results[0].history
        weights = (
            first["weight/kl"] if callable(weight) else np.full(len(steps), weight)
        )
        top.plot(steps, weights, color=colors[name])
        # Not computed where its weight is 0: these steps have no value.
        kl = [smooth(np.ma.filled(r.history["kl"], np.nan), 40) for r in results]
        label = f"{name}: test -ELBO {loss:.2f}, {units:.1f} of 8 latents active"
        band(low, steps, kl, colors[name], label)
    top.set(title="Weight of the KL term")
    low.set(
        title="KL term in training, unweighted, 3 seeds", xlabel="step", ylim=(0, 24)
    )
    low.legend()
    return figure


def smooth(values, width):
    """Means over a window, of the values that there are."""
    known = np.isfinite(values)
    window = np.ones(width)
    sums = np.convolve(np.where(known, values, 0), window, "same")
    return sums / np.convolve(known, window, "same")


def draw_gan(gan, config):
    """What the critic sees, and samples over data."""
    runs = gan.experiment(config, progress=False)
    figure, axes = plt.subplots(1, 1 + len(runs), figsize=(11, 3.4))
    real, colors = gan.ring(jr.key(0), 2000), (BLUE, ORANGE, GREEN)
    for run, color, axis in zip(runs.items(), colors, axes[1:], strict=True):
        seed, (result, averaged, measured) = run
        fake, found = averaged.generate(jr.key(1), 2000), measured["averaged"]
        axis.scatter(*real.T, s=3, color="#bbbbbb", label="real")
        axis.scatter(*fake.T, s=3, color=color, alpha=0.4, label="generated", lw=0)
        axis.set(xlabel=f"spread {found['spread']:.2f}", xticks=[], yticks=[])
        title = f"Seed {seed}: {found['modes']} of 8 modes,\n{found['good']:.1%} good"
        axis.set(title=title, aspect="equal")
        distance = result.history["critic/distance"]
        steps = np.flatnonzero(~distance.mask)
        axes[0].plot(steps, smooth(distance.compressed(), 200), color=color)
    axes[1].legend(markerscale=4, loc="center")
    title = "Distance, as the critic\nsees it, smoothed"
    axes[0].set(title=title, xlabel="step", ylim=(-0.05, 0.4))
    return figure


def draw_pinn(pinn, config):
    """The solution, its error, and the weights, in both phases."""
    result = pinn.experiment(config, progress=False)
    history, adam = result.history, int(config["adam"] * config["num_steps"])
    t, x, u = pinn.make_grid()
    found = np.asarray(
        pinn.jax.vmap(pinn.jax.vmap(result.model))(*map(np.float32, (t, x)))
    )
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4))
    draw_field(figure, axes[0, 0], t, x, found, "u(t, x), as found", cmap="RdBu_r")
    error = np.log10(np.abs(found - u) + 1e-7)
    title = "Base-10 logarithm of the absolute error"
    draw_field(figure, axes[0, 1], t, x, error, title, cmap="viridis", vmin=-6)
    low, right = axes[1]
    low.semilogy(history.steps("test/loss"), history["test/loss"], color=BLACK)
    low.set(title=f"Relative L2 error: {history['test/loss'][-1]:.1e} at the end")
    for name, color in (("residual", BLUE), ("values", ORANGE)):
        phases = [history[f"{phase}/weight/{name}"] for phase in ("adam", "lbfgs")]
        weight = np.where(np.ma.getmaskarray(phases[0]), phases[1], phases[0])
        right.semilogy(np.asarray(weight), color=color, label=name)
    right.set(title="Weights of the terms")
    right.legend()
    for axis in (low, right):
        axis.axvspan(0, adam, color=SKY, alpha=0.25, lw=0)
        axis.set(xlabel="step", xlim=(0, config["num_steps"]))
    low.text(adam / 2, 0.05, "Adam", ha="center", transform=low.get_xaxis_transform())
    low.text(adam * 1.2, 0.05, "L-BFGS", transform=low.get_xaxis_transform())
    return figure


def draw_field(figure, axes, t, x, values, title, **how):
    """Draw a function of t and x."""
    picture = axes.pcolormesh(t, x, values, shading="auto", rasterized=True, **how)
    figure.colorbar(picture, ax=axes)
    axes.grid(visible=False)
    axes.set(title=title, xlabel="t", ylabel="x")


def draw_curriculum(curriculum, config):
    """What is drawn, and what is learned."""
    runs = curriculum.experiment(config, progress=False)
    figure, (top, low) = plt.subplots(2, 1, figsize=(8, 5), sharex=True)
    steps = np.arange(config["num_steps"])
    share = (
        config["first"] + (1 - config["first"]) * steps / len(steps) / config["over"]
    )
    longest = config["longest"]
    top.plot(
        steps, np.minimum(longest * share, longest), color=BLUE, label="curriculum"
    )
    top.plot(steps, np.full(len(steps), longest), color=RED, label="uniform")
    top.set(title="Longest row that is drawn, in bits", ylim=(0, None))
    for name, color in (("uniform", RED), ("curriculum", BLUE)):
        for number, result in enumerate(runs[name]):
            at, accuracy = (
                f("test/loss") for f in (result.history.steps, result.history.get)
            )
            low.plot(
                at, accuracy, color=color, alpha=0.8, label=None if number else name
            )
    low.set(title="Test accuracy on rows of all lengths, 3 seeds", xlabel="step")
    top.legend(loc="lower right")
    return figure


def draw_finetune(finetune, config):
    """Test accuracies while fine-tuning."""
    runs = finetune.experiment(config, progress=False)
    figure, axes = plt.subplots(figsize=(8, 4))
    colors = (ORANGE, GREEN, BLUE, "#777777")
    start = config["start"] * config["num_steps"]
    axes.axvspan(0, start, color=SKY, alpha=0.2, lw=0)
    axes.text(
        start / 2,
        0.3,
        "“head, then all”:\nbody frozen",
        ha="center",
        va="top",
        transform=axes.get_xaxis_transform(),
    )
    for (way, found), color in zip(runs.items(), colors, strict=True):
        curves = [result.history["test/loss"] for result, _ in found]
        steps = found[0][0].history.steps("test/loss")
        mean = np.mean(curves, axis=0)
        axes.plot(steps, mean, color=color, label=f"{way}: {mean[-1]:.3f}", lw=2)
    axes.set(
        title=f"Test accuracy with {config['labels']} labels a digit, mean of 5 seeds"
    )
    axes.set(xlabel="step of fine-tuning", ylim=(0.8, None))
    axes.legend(loc="lower right")
    return figure


DRAW = {
    "vae": draw_vae,
    "gan": draw_gan,
    "pinn": draw_pinn,
    "curriculum": draw_curriculum,
    "finetune": draw_finetune,
}


def main():
    """Draw the pictures that are asked for, or all."""
    mpl.use("Agg")
    (ROOT / "docs" / "img").mkdir(exist_ok=True)
    for name in sys.argv[1:] or DRAW:
        config = tomllib.loads((ROOT / "configs" / f"{name}.toml").read_text())
        with mpl.rc_context(STYLE):
            figure = DRAW[name](__import__(name), config)
            figure.tight_layout()
            path = ROOT / "docs" / "img" / f"{name}.png"
            figure.savefig(path)
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(200, dither=Image.Dither.NONE)
        small.save(path, optimize=True)
        plt.close(figure)


if __name__ == "__main__":
    main()
