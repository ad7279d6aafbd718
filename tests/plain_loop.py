"""Programs as plain data: built for a Trainer, and run by a loop in plain Python."""

from fractions import Fraction
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import trainer as tr


BATCHES = np.random.default_rng(7).normal(size=(4, 5, 2)).astype(np.float32)
NAMES = ("a", "b", "c", "t")


class Model(eqx.Module):
    a: jax.Array
    b: jax.Array
    c: jax.Array
    t: jax.Array


def first_params():
    """The model as the plain loop has it, by name."""
    values = np.random.default_rng(5).normal(size=(4, 2)).astype(np.float32)
    return dict(zip(NAMES, values, strict=True))


class Now(NamedTuple):
    """A step, a place in the program, and what was drawn there: its history, counts."""

    step: int
    epoch: int
    num_steps: int
    recorded: dict[str, Any]
    had: dict[Any, int]
    path: str = ""

    def below(self, name):
        return self._replace(path=f"{self.path}{name}/")


def steps_of(value, num_steps):
    return int(Fraction(str(value)) * num_steps) if isinstance(value, float) else value


class Ramp(NamedTuple):
    """A schedule that is 0 at `zero`; only there, or up to there if it is late."""

    zero: int
    late: bool

    def build(self):
        return lambda step: self.at(step, None)

    def at(self, count, num_steps):
        return 0.75 * (count > self.zero) if self.late else (count - self.zero) / 8


class Annealed(NamedTuple):
    start: float
    stop: float
    over: int | float
    cycles: int
    ramp: float

    def build(self):
        return tr.Anneal(
            self.start, self.stop, self.over, cycles=self.cycles, ramp=self.ramp
        )

    def at(self, count, num_steps):
        over = max(steps_of(self.over, num_steps), 1)
        if count >= over:
            return self.stop
        place = count % -(-over // self.cycles) / (over / self.cycles)
        return self.start + (self.stop - self.start) * min(place / self.ramp, 1.0)


class Leaf(NamedTuple):
    """A loss that is quadratic in each parameter: of the batch, or of the model."""

    kind: str
    curve: float
    report: bool

    def build(self):
        def loss(model, batch, *, step, epoch):
            count, metrics = step + 2 * epoch, {}
            if self.kind == "fit":
                miss = model.a + model.b * batch - model.c
                value = self.curve / 2 * jnp.mean(jnp.sum(miss**2, 1))
                value += count / 64 * jnp.mean(batch @ model.a)
                metrics = {"middle": jnp.mean(batch)}
            elif self.kind == "size":
                squares = sum(jnp.sum(x**2) for x in (model.a, model.b, model.c))
                value = self.curve / 2 * squares + count / 64 * jnp.sum(model.b)
            else:
                value = self.curve / 2 * jnp.sum((model.a - model.t) ** 2)
            return (value, {"seen": count, **metrics}) if self.report else value

        return loss

    def interpret(self, p, x, now):
        count, metrics = now.step + 2 * now.epoch, {}
        p, x = {n: v.astype(float) for n, v in p.items()}, x.astype(float)
        grad = {n: np.zeros(2) for n in NAMES}
        if self.kind == "fit":
            miss, x_mean = p["a"] + p["b"] * x - p["c"], x.mean(0)
            value = self.curve / 2 * (miss**2).sum(1).mean()
            value += count / 64 * (x_mean @ p["a"])
            grad["a"] = self.curve * miss.mean(0) + count / 64 * x_mean
            grad["b"] = self.curve * (miss * x).mean(0)
            grad["c"] = -self.curve * miss.mean(0)
            metrics = {"middle": x.mean()}
        elif self.kind == "size":
            value = self.curve / 2 * sum(p[n] @ p[n] for n in "abc")
            value += count / 64 * p["b"].sum()
            grad |= {n: self.curve * p[n] for n in "abc"}
            grad["b"] = grad["b"] + count / 64
        else:
            value = self.curve / 2 * ((p["a"] - p["t"]) ** 2).sum()
            grad["a"] = self.curve * (p["a"] - p["t"])
            grad["t"] = -grad["a"]
        return value, grad, {"seen": count, **metrics} if self.report else {}


class Turns(NamedTuple):
    """A selector; `numbers` are what it was given."""

    kind: str
    numbers: Any
    num: int

    def build(self):
        kinds = {"every": tr.Every, "cycle": tr.Cycle, "at": tr.At}
        return {**kinds, "random": tr.Random}[self.kind](self.numbers)

    def branch(self, count, num_steps):
        if self.kind == "every":
            return count // self.numbers % self.num
        if self.kind == "cycle":
            return np.repeat(range(self.num), self.numbers)[count % sum(self.numbers)]
        starts = np.maximum.accumulate([steps_of(b, num_steps) for b in self.numbers])
        return sum(count >= start for start in starts)

    def pick(self, by, now):
        """The branch, and what its parts know: they count from its own start."""
        if self.kind == "random":
            index = int(now.recorded[f"{now.path}branch"])
            local = now.had.get((now.path, index), 0)
            now.had[now.path, index] = local + 1
        else:
            count, num_steps = getattr(now, by), now.num_steps
            *earlier, index = [self.branch(c, num_steps) for c in range(count + 1)]
            local = earlier.count(index)
        return index, now._replace(**{by: local})


class Pick(NamedTuple):
    turns: Turns
    by: str
    parts: list[Any]

    def build(self):
        named = {f"b{n}": part.build() for n, part in enumerate(self.parts)}
        return tr.Switch(self.turns.build(), named, by=self.by)

    def interpret(self, p, x, now):
        index, now = self.turns.pick(self.by, now)
        now = now.below(f"b{index}")
        value, grad, metrics = self.parts[index].interpret(p, x, now)
        inner = lambda name: name.split("/")[-1] == "branch"
        renamed = {f"b{index}/{k}" if inner(k) else k: v for k, v in metrics.items()}
        return value, grad, {**renamed, "branch": index}


class Add(NamedTuple):
    by: str
    terms: list[Any]

    def build(self):
        built = lambda w: w if isinstance(w, float) else w.build()
        terms = {f"t{n}": (built(w), t.build()) for n, (w, t) in enumerate(self.terms)}
        return tr.WeightedSum(by=self.by, **terms)

    def interpret(self, p, x, now):
        value, grad, metrics = 0.0, {n: np.zeros(2) for n in NAMES}, {}
        for n, (weight, term) in enumerate(self.terms):
            if not isinstance(weight, float):
                weight = weight.at(getattr(now, self.by), now.num_steps)
                metrics[f"weight/t{n}"] = weight
            if weight == 0:
                continue
            part, slope, inner = term.interpret(p, x, now.below(f"t{n}"))
            value += weight * part
            grad = {name: grad[name] + weight * slope[name] for name in NAMES}
            metrics |= {f"t{n}": part, **{f"t{n}/{k}": v for k, v in inner.items()}}
        return value, grad, metrics


RATE = optax.linear_schedule(0.1, 0.0, 8)
# A large `eps`: Adam does not blow up the rounding of a gradient that is near 0.
OPTIMIZERS: dict[str, Any] = {
    "momentum": optax.sgd(0.05, momentum=0.8),
    "adam": optax.adam(0.05, eps=0.01),
    "injected": optax.inject_hyperparams(optax.sgd)(RATE),
}


def where(owned):
    return owned and (lambda m: [getattr(m, name) for name in owned])


def only(p, owned):
    return {name: jnp.asarray(p[name]) for name in owned or NAMES}


def optimized(optimizer, owned, p, state, grad):
    params, grad = only(p, owned), only(grad, owned)
    grad = {name: g.astype(jnp.float32) for name, g in grad.items()}
    updates, state = OPTIMIZERS[optimizer].update(grad, state, params)
    new: Any = optax.apply_updates(params, updates)
    return {**p, **{name: np.asarray(v) for name, v in new.items()}}, state


def rate(label, optimizer, state):
    injected = optimizer == "injected"
    return {label: RATE(int(state.count) - 1)} if injected else {}


class Piece(NamedTuple):
    """What a `tr.Part` is made of."""

    optimizer: str
    owned: Any
    start: int | float
    stop: int | float | None
    by: str

    def build(self):
        times = {"start": self.start, "stop": self.stop, "by": self.by}
        return tr.Part(OPTIMIZERS[self.optimizer], where(self.owned), **times)

    def acts(self, now):
        count, stop = getattr(now, self.by), self.stop
        begun = count >= steps_of(self.start, now.num_steps)
        return begun and (stop is None or count < steps_of(stop, now.num_steps))


class Min(NamedTuple):
    """A `tr.Minimize`; `optimizer` is a name, or pieces by name."""

    loss: Any
    optimizer: Any
    owned: Any
    micro: int

    def build(self):
        if isinstance(self.optimizer, str):
            options = {"where": where(self.owned), "micro_batches": self.micro}
            optimizer = OPTIMIZERS[self.optimizer]
            return tr.Minimize(self.loss.build(), optimizer, **options)
        parts = tr.Parts(**{n: piece.build() for n, piece in self.optimizer.items()})
        return tr.Minimize(self.loss.build(), parts, micro_batches=self.micro)

    def init(self, p):
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer].init(only(p, self.owned))
        start = lambda piece: OPTIMIZERS[piece.optimizer].init(only(p, piece.owned))
        return {name: start(piece) for name, piece in self.optimizer.items()}

    def interpret(self, p, state, x, now):
        value, grad, metrics = self.loss.interpret(p, x, now)
        metrics = {"loss": value, **metrics}
        if isinstance(self.optimizer, str):
            p, state = optimized(self.optimizer, self.owned, p, state, grad)
            return p, state, metrics | rate("learning_rate", self.optimizer, state)
        state = dict(state)
        for name, (optimizer, owned, start, stop, _) in self.optimizer.items():
            acts = self.optimizer[name].acts(now)
            if acts:
                p, state[name] = optimized(optimizer, owned, p, state[name], grad)
                metrics |= rate(f"{name}/learning_rate", optimizer, state[name])
            if (start, stop) != (0, None):
                metrics[f"{name}/acts"] = acts
        return p, state, metrics


def followed(options, p, done):
    """After `done` updates, the target follows."""
    if not options or done % options.get("every", 1):
        return p
    tau = options.get("tau", 1.0)
    return p | {"t": np.float32(tau * p["a"] + (1 - tau) * p["t"])}
