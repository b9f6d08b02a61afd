"""Decode steps of Gemma 4 31B and 26B-A4B that somebody else timed on a v5e-8, compiled here.

    python -m appendix.decode     predicts the rows that data/anchors/anchors.csv lacks (08)

The others wrote the model in plain JAX, without Tunix and without a kernel: one row, one new token,
bfloat16, every weight cut over all eight chips ("tp"), and the whole cache is read and masked at
every step, in the sliding layers, too. We write it again with their shapes, shardings and order.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_time import anchors, compiler
from tpu_time.anchors import Cut, Shape

Arrays = dict[str, jax.Array]
Cache = list[tuple[jax.Array, jax.Array]]  # keys and values of each layer


@dataclass(frozen=True)
class Attention:
    """One kind of layer's attention.

    Attributes:
      kv_heads, size: heads of keys and values, and the numbers of one head.
      base, rotated: of the rotary positions; the share of a head's pairs that turns.
      window: how many tokens back it sees; 0: all.
      own_values: whether values have a matrix of their own, or are the keys before their norm.
      by_heads: cut by KV heads; if not, by the query heads of one KV head, and keys are whole.
    """

    kv_heads: int
    size: int
    base: float
    rotated: float
    window: int
    own_values: bool
    by_heads: bool

    def waves(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosine and sine [tokens, size] of the rotary positions, in float32."""
        turning = int(self.rotated * self.size // 2)
        exponents = np.arange(0, 2 * turning, 2) / self.size
        speeds = np.zeros(self.size // 2, np.float32)
        speeds[:turning] = self.base**-exponents
        angles = positions.astype(jnp.float32)[:, None] * speeds
        angles = jnp.concatenate([angles, angles], -1)
        return jnp.cos(angles), jnp.sin(angles)

    def visible(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """Which keys [1, 1, 1, queries, keys] each query sees, by their positions."""
        seen = keys <= queries[:, None]
        if self.window:
            seen &= keys > queries[:, None] - self.window
        return seen[None, None, None]


@dataclass(frozen=True)
class Decoder:
    """The model, whose step is lowered for eight chips.

    Attributes:
      layers, width, inner, heads, vocabulary: its sizes; every sixth layer is a full one.
      sliding, full: attention of the two kinds of layers.
      room: tokens of the cache.
      experts, chosen, expert_inner: how many experts a layer has and a token takes, and their
        inner width; 0 experts: a dense model.
      top: how many of the likeliest tokens are drawn from.
      route: how a step reaches the weights of the chosen experts (`_routed`).
    """

    layers: int
    width: int
    inner: int
    heads: int
    sliding: Attention
    full: Attention
    room: int
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    vocabulary: int = 262_144
    top: int = 64
    route: str = "slices"

    def kind(self, layer: int) -> Attention:
        """Which attention a layer has."""
        return self.full if layer % 6 == 5 else self.sliding

    def weights(self, layer: int) -> dict[str, tuple[Shape, Cut]]:
        """{name: (shape, how it's cut)} of a layer."""
        kind = self.kind(layer)
        groups = self.heads // kind.kv_heads
        keys: Cut = ("tp",) if kind.by_heads else ()
        shapes: dict[str, tuple[Shape, Cut]] = {
            "q": ((kind.kv_heads, groups, kind.size, self.width), keys or (None, "tp")),
            "k": ((kind.kv_heads, kind.size, self.width), keys),
            "o": ((self.width, kind.kv_heads, groups, kind.size), (None, *(keys or (None, "tp")))),
            "q norm": ((kind.size,), ()),
            "k norm": ((kind.size,), ()),
            "gate": ((self.inner, self.width), ("tp",)),
            "up": ((self.inner, self.width), ("tp",)),
            "down": ((self.width, self.inner), (None, "tp")),
            "scale": ((1,), ()),
        }
        if kind.own_values:
            shapes["v"] = shapes["k"]
        norms = ["before attention", "after attention", "before mlp", "after mlp"]
        if self.experts:
            norms += ["after dense", "before experts", "after experts", "router scale"]
            one = (self.expert_inner, self.width)
            shapes["router"] = ((self.experts, self.width), ())
            shapes["expert scale"] = ((self.experts,), ())
            shapes["experts in"] = ((self.experts, 2, *one), (None, None, "tp"))
            shapes["experts out"] = ((self.experts, *one[::-1]), (None, None, "tp"))
        for name in norms:
            shapes[name] = ((self.width,), ())
        return shapes

    def lower(self, devices: list, tokens: int = 1) -> jax.stages.Lowered:
        """The step lowered: one new token at a position that the chip is told, or a prompt.

        Args:
          devices: eight of them.
          tokens: 1, or the prompt's with its padding; a prompt sees itself alone, from position 0.
        """
        mesh = Mesh(np.array(devices), ("tp",))
        place = functools.partial(anchors.placed, mesh)
        embedding = place((self.vocabulary, self.width), "bfloat16", (None, "tp"))
        norm = place((self.width,), "bfloat16")
        layers = []
        cache = []
        for layer in range(self.layers):
            named = {}
            for name, (sizes, cut) in self.weights(layer).items():
                named[name] = place(sizes, "bfloat16", cut)
            layers.append(named)
            kind = self.kind(layer)
            cut = (None, None, "tp") if kind.by_heads else ()
            kept = place((1, self.room, kind.kv_heads, kind.size), "bfloat16", cut)
            cache.append((kept, kept))

        def step(embedding: jax.Array, norm: jax.Array, layers: list[Arrays], ids: jax.Array,
                 cache: Cache, position: jax.Array, key: jax.Array, heat: jax.Array,
                 top_p: jax.Array) -> tuple[jax.Array, Cache, jax.Array]:
            is_prompt = tokens > 1
            x, cache = self._read(mesh, embedding, layers, ids, cache, position, is_prompt)
            x = rms(x, norm)
            if is_prompt:  # `position` is the prompt's length without padding
                x = jax.lax.dynamic_slice_in_dim(x, position - 1, 1, 1)
            cut = NamedSharding(mesh, PartitionSpec(None, None, "tp"))
            x = jax.lax.with_sharding_constraint(x, cut)
            logits = whole(jnp.einsum("btw,vw->btv", x, embedding), mesh).astype(jnp.float32)
            logits = jnp.tanh(logits / 30.0) * 30.0
            turn = 0 if is_prompt else position
            drawn = draw(logits[0, 0], jax.random.fold_in(key, turn), heat, self.top, top_p)
            return drawn.reshape(1, 1), cache, position + (not is_prompt)

        number = place((), "float32")
        return jax.jit(step, donate_argnums=4).lower(
            embedding, norm, layers, place((1, tokens), "int32"), cache, place((), "int32"),
            place((2,), "uint32"), number, number)

    def _read(self, mesh: Mesh, embedding: jax.Array, layers: list[Arrays], ids: jax.Array,
              cache: Cache, position: jax.Array, is_prompt: bool) -> tuple[jax.Array, Cache]:
        """All layers: the residual stream [1, tokens, width] at their end, and the new cache."""
        count = ids.shape[1]
        positions = jnp.arange(count) if is_prompt else position.reshape(1)
        room = count if is_prompt else self.room
        keys = jnp.arange(room)[None, :]
        waves, seen = {}, {}
        for kind in (self.sliding, self.full):
            waves[kind] = kind.waves(positions)
            seen[kind] = kind.visible(positions, keys)
            if is_prompt:
                seen[kind] &= (keys < position)[None, None, None]
        x = whole(jnp.take(embedding, ids, axis=0), mesh)
        x = x * jnp.float32(self.width**0.5).astype(jnp.bfloat16)
        start = 0 if is_prompt else position
        after = []
        for layer, w in enumerate(layers):
            kind = self.kind(layer)
            h = rms(x, w["before attention"])
            h, kept = self._attend(kind, w, h, waves[kind], seen[kind], cache[layer], start)
            after.append(kept)
            x = x + rms(whole(h, mesh), w["after attention"])
            h = rms(x, w["before mlp"])
            gate = jax.nn.gelu(jnp.einsum("btw,iw->bti", h, w["gate"]))
            inner = gate * jnp.einsum("btw,iw->bti", h, w["up"])
            h = whole(jnp.einsum("bti,wi->btw", inner, w["down"]), mesh)
            if self.experts:
                route = "all" if is_prompt else self.route
                h = rms(h, w["after dense"]) + self._experts(w, x, mesh, route)
            x = (x + rms(h, w["after mlp"])) * w["scale"]
        return x, after

    def _attend(self, kind: Attention, w: Arrays, x: jax.Array,
                waves: tuple[jax.Array, jax.Array], seen: jax.Array,
                cache: tuple[jax.Array, jax.Array], start: jax.Array | int
                ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attention of x [1, tokens, width] over the whole cache; what's added, and the cache."""
        q = turned(rms(jnp.einsum("btw,kgdw->btkgd", x, w["q"]), w["q norm"]), waves)
        raw = jnp.einsum("btw,kdw->btkd", x, w["k"])
        values = jnp.einsum("btw,kdw->btkd", x, w["v"]) if kind.own_values else raw
        fresh = turned(rms(raw, w["k norm"]), waves), rms(values)
        corner = (0, start, 0, 0)
        k, v = (jax.lax.dynamic_update_slice(old, new, corner)
                for old, new in zip(cache, fresh, strict=True))
        room = seen.shape[-1]
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k[:, :room]).astype(jnp.float32)
        shares = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", shares, v[:, :room])
        return jnp.einsum("btkgd,wkgd->btw", mixed, w["o"]), (k, v)

    def _experts(self, w: Arrays, x: jax.Array, mesh: Mesh, route: str) -> jax.Array:
        """What the chosen experts add for x [1, tokens, width]."""
        flat = x.reshape(-1, self.width)
        h = rms(flat, w["before experts"])
        asked = rms(h) * w["router scale"] * jnp.bfloat16(self.width**-0.5)
        scores = jnp.einsum("nw,ew->ne", asked, w["router"]).astype(jnp.float32)
        shares, best = jax.lax.top_k(jax.nn.softmax(scores, -1), self.chosen)
        shares = shares / jnp.sum(shares, -1, keepdims=True)
        shares = shares * w["expert scale"].astype(jnp.float32)[best]
        out = self._routed(route, h, best, shares, w["experts in"], w["experts out"])
        return rms(whole(out.reshape(x.shape), mesh), w["after experts"])

    def _routed(self, route: str, h: jax.Array, best: jax.Array, shares: jax.Array,
                inward: jax.Array, outward: jax.Array) -> jax.Array:
        """The experts' weighted sum [tokens, width], by one of four ways to reach their weights.

        Args:
          route: "all": every expert computes, and most count nothing; "take": the chosen ones are
            gathered; "slices", "loop": one after the other, for a single token.
          h: [tokens, width].
          best, shares: [tokens, chosen] which experts, and how much they count.
          inward, outward: weights [experts, 2, inner, width] and [experts, width, inner].
        """
        if route == "all":
            ones = jax.nn.one_hot(best, self.experts, dtype=jnp.float32)
            counted = jnp.einsum("nk,nke->ne", shares, ones)
            both = jnp.einsum("nw,eciw->neci", h, inward)
            inner = jax.nn.gelu(both[:, :, 0]) * both[:, :, 1]
            inner = inner * counted[:, :, None].astype(inner.dtype)
            return jnp.einsum("nei,ewi->nw", inner, outward)
        if route == "take":
            both = jnp.einsum("nw,nkciw->nkci", h, jnp.take(inward, best, axis=0))
            inner = jax.nn.gelu(both[:, :, 0]) * both[:, :, 1]
            inner = inner * shares[:, :, None].astype(inner.dtype)
            return jnp.einsum("nki,nkwi->nw", inner, jnp.take(outward, best, axis=0))

        def one(place: jax.Array | int) -> jax.Array:
            def chosen(stack: jax.Array) -> jax.Array:
                return jax.lax.dynamic_index_in_dim(stack, best[0, place], 0, keepdims=False)
            both = jnp.einsum("w,ciw->ci", h[0], chosen(inward))
            inner = jax.nn.gelu(both[0]) * both[1] * shares[0, place].astype(both.dtype)
            return jnp.einsum("i,wi->w", inner, chosen(outward))

        if route == "loop":
            def add(place: jax.Array, total: jax.Array) -> jax.Array:
                return total + one(place).astype(jnp.float32)
            start = jnp.zeros(self.width, jnp.float32)
            return jax.lax.fori_loop(0, self.chosen, add, start).astype(h.dtype)
        total = one(0)
        for place in range(1, self.chosen):
            total = total + one(place)
        return total


def rms(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """RMSNorm in float32, rounded back."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(jnp.square(wide), -1, keepdims=True)
    out = wide * jax.lax.rsqrt(mean + 1e-6)
    if scale is not None:
        out = out * scale.astype(jnp.float32)
    return out.astype(x.dtype)


def turned(x: jax.Array, waves: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary positions for [1, tokens, heads..., size]."""
    first, second = jnp.split(x, 2, -1)
    other = jnp.concatenate([-second, first], -1)
    shape = (1, x.shape[1], *(1,) * (x.ndim - 3), x.shape[-1])
    cosine, sine = (wave.reshape(shape).astype(x.dtype) for wave in waves)
    return x * cosine + other * sine


def whole(x: jax.Array, mesh: Mesh) -> jax.Array:
    """An array that every chip holds whole from here on: what was cut is gathered or summed."""
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * x.ndim))
    return jax.lax.with_sharding_constraint(x, sharding)


def draw(logits: jax.Array, key: jax.Array, heat: jax.Array, top: int, top_p: jax.Array
         ) -> jax.Array:
    """The next token of logits [vocabulary]: the likeliest, or drawn if the heat is positive."""
    likeliest = jnp.argmax(logits)
    values, ids = jax.lax.top_k(logits / jnp.maximum(heat, 1e-6), top)
    shares = jax.nn.softmax(values)
    before = jnp.cumsum(shares) - shares
    shares = jnp.where(before < top_p, shares, 0.0)
    shares = shares / jnp.sum(shares)
    drawn = ids[jax.random.categorical(key, jnp.log(shares + 1e-20))]
    return jnp.where(heat <= 0, likeliest, drawn).astype(jnp.int32)


# ── the anchors ──


DENSE = Decoder(
    layers=60,
    width=5_376,
    inner=21_504,
    heads=32,
    sliding=Attention(16, 256, 1e4, 1.0, 1_024, own_values=True, by_heads=True),
    full=Attention(4, 512, 1e6, 0.25, 0, own_values=False, by_heads=False),
    room=16_384,
)
EXPERTS = Decoder(
    layers=30,
    width=2_816,
    inner=2_112,
    heads=16,
    sliding=Attention(8, 256, 1e4, 1.0, 1_024, own_values=True, by_heads=True),
    full=Attention(2, 512, 1e6, 0.25, 0, own_values=False, by_heads=False),
    room=32_768,
    experts=128,
    chosen=8,
    expert_inner=704,
)


def timed(model: Decoder, name: str, milliseconds: float, where: str, tokens: int = 1,
          clock: str = "host") -> anchors.Anchor:
    """One measurement of theirs.

    Args:
      model: whose step was timed.
      name: of the model.
      milliseconds: measured.
      where: the number stands in their README, of which commit.
      tokens: 1, or those of a prompt with its padding.
      clock: the host's over 8 or 64 steps in a row (host), over one call that waits for its end
        (one call), or from a request to its first token (first token).
    """
    step = "a token" if tokens == 1 else f"a prompt of {tokens} tokens"
    if model.experts and tokens == 1:
        step += f", experts by {model.route}"
    return anchors.Anchor(
        program=f"Gemma 4 {name}: {step}, one row, tp 8, cache of {model.room:,} tokens",
        slice="v5e-8",
        milliseconds=milliseconds,
        clock=clock,
        source=f"YLiu95/kaggle-tpu-inference: README.md {where}",
        versions="JAX 0.10.2",
        lower=functools.partial(model.lower, tokens=tokens),
        mesh=(8, 1),
        lacks=SORTS if model.experts and tokens == 1 else SORT,
    )


SORT = "the sort of 262,144 logits"
SORTS = "the sort of 262,144 logits and 30 of 128 experts"
SMALL = dataclasses.replace(EXPERTS, room=4_096)
TIMED = {
    "decode 31B": timed(DENSE, "31B", 19.88, "(dd910c9): 19.88 ms/token"),
    "prefill 31B": timed(DENSE, "31B", 81.0, "(dd910c9): 66-token prompt, 81 ms", 256,
                         "first token"),
    "decode 26B": timed(EXPERTS, "26B-A4B", 9.41, "(db25d8c): 9.41 ms a step"),
}
for _route, _milliseconds in {"slices": 6.72, "loop": 8.79, "take": 15.21, "all": 14.18}.items():
    TIMED[f"decode 26B {_route}"] = timed(
        dataclasses.replace(SMALL, route=_route), "26B-A4B", _milliseconds,
        "(65c6e77): MoE decode variants")


def main() -> None:
    """Predict the rows that are not stored."""
    compiler.start()
    anchors.main([], TIMED)


if __name__ == "__main__":
    main()
