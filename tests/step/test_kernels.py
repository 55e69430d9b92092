"""The kernels for a GPU against their twins in float64: on a GPU, or step by step in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn

import gradguess as gg
from gradguess import kernels, linalg
from gradguess.compact import Compact
from gradguess.guesses._base import GatedBasis
from gradguess.layers.tangents import TangentRules
from gradguess.upstream import ClosedForm

pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(10, 300, 4, 1), (3, 40, 18, 2), (15, 130, 3, 1), (1, 7, 3, 1)]  # k, d, batch, tangents


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def basis_and_gate(k: int, d: int, batch: int) -> tuple[Tensor, Tensor]:
    """A sample whose units are all closed, and one with fewer open units than directions, are among them."""
    gate = (noise(batch, d, seed=1) > 0) * noise(batch, d, seed=2).abs()
    gate[0] = 0
    gate[1, max(1, k - 2) :] = 0
    return torch.linalg.qr(noise(d, k))[0], gate


def factors(C: Tensor) -> tuple[Tensor, Tensor]:
    """The tolerance is that of float32, in which the matrices were made."""
    return linalg.semidefinite_cholesky(C.double(), rtol=100 * C.shape[-1] * torch.finfo(torch.float32).eps)


def on(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("k", "d", "batch", "n"), SHAPES)
def test_a_direction_is_that_of_the_gated_basis(k, d, batch, n, binary):
    V, gate = basis_and_gate(k, d, batch)
    gate = (gate > 0).float() if binary else gate
    z = noise(n, batch, k, seed=3)
    C = torch.einsum("dk,bd,dl->bkl", V, gate.square(), V)
    L, alive = factors(C)
    expected = torch.einsum("bd,dk,nbk->nbd", gate.double(), V.double(), linalg.triangular_apply(L, z * alive))
    found = kernels.draw(*on(V, gate, z), binary).cpu()
    # a sample with few open units keeps pivots down to 2e-3 of the largest: rounding is as many times larger
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[:, 2:].double(), expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert (found[:, 0] == 0).all()


def test_directions_have_a_projector_as_covariance():
    V, gate = basis_and_gate(6, 60, 4)
    columns = kernels.draw(
        *on(V, gate, torch.eye(6)[:, None].expand(6, 4, 6).contiguous())
    ).cpu()  # A, column by column
    for b in range(4):
        A = columns[:, b].mT
        P = A @ A.mT
        torch.testing.assert_close(P @ P, P, rtol=0, atol=1e-4)
        assert round(float(P.trace())) == int(torch.linalg.matrix_rank(gate[b, :, None] * V))


@pytest.mark.parametrize(("k", "d", "batch", "n"), SHAPES)
def test_small_solves(k, d, batch, n):
    V, gate = basis_and_gate(k, d, batch)
    C, z = torch.einsum("dk,bd,dl->bkl", V, gate.square(), V), noise(n, batch, k, seed=3)
    L, alive = factors(C)
    found = kernels.solve(*on(C, z)).cpu()
    torch.testing.assert_close(found.double(), linalg.triangular_apply(L, z * alive), rtol=1e-3, atol=1e-3)
    floor = kernels._tolerance(k) * C.diagonal(dim1=-2, dim2=-1).amax(-1)
    ours, kept = kernels.cholesky(*on(C, floor))
    assert torch.equal(kept.cpu(), alive)
    torch.testing.assert_close(ours.cpu().double(), L, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("k", "d"), [(10, 60), (20, 128), (1, 5)])
def test_orthonormal_rows(k, d):
    R = noise(4, k, d)
    if k > 5:
        R[1, 3] = R[1, 0] + R[1, 1]  # dependent
        R[2, 5:] = 0
        R[0, 2] *= 1e-3  # weak, but there
    R = R / R.abs().amax((-2, -1), keepdim=True)
    rtol = 10 * (k + d**0.5) * torch.finfo(R.dtype).eps
    found, left = kernels.orthonormal_rows(R.to(DEVICE), rtol)
    expected, others = linalg._cholesky_rows(R.double(), rtol)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(left.cpu().double(), others, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("n", [2, 7, 32])
def test_eigenvectors_of_small_matrices(n):
    H = noise(5, n, n)
    H = H @ H.mT / n
    H[1] = torch.eye(n)  # one value, many times
    H[2] = 0
    H[3] *= torch.where(torch.arange(n) < n // 2, 1e-4, 1.0)  # rows and columns of different size
    H[3] = (H[3] + H[3].mT) / 2
    H[0] *= 1e-25
    H[4, n // 2 :], H[4, :, n // 2 :] = 0, 0  # singular
    values, Z = (part.cpu().double() for part in kernels.eigh(H.to(DEVICE)))
    expected = torch.linalg.eigvalsh(H.double())
    scale = expected.abs().amax(-1)[:, None]
    assert ((values - expected).abs() <= 1e-5 * scale).all()
    torch.testing.assert_close(Z.mT @ Z, torch.eye(n).double().expand(5, n, n), rtol=0, atol=1e-5)
    rest = H.double() @ Z - Z * values[:, None, :]
    assert (rest.abs() <= 1e-5 * scale[:, None]).all()


def test_rows_are_weighed():
    y, c = noise(5, 300), noise(5, seed=1)
    torch.testing.assert_close(kernels.weigh(y.clone().to(DEVICE), c.to(DEVICE), 0.25).cpu(), 0.25 * c[:, None] * y)


def test_a_relu_with_its_gate():
    s = noise(3, 700)
    s[0, 0], s[1, 1] = 0, torch.nan
    found = s.clone().to(DEVICE)
    gate = kernels.rectify(found)
    assert torch.equal(gate.cpu(), (s > 0).float())
    torch.testing.assert_close(found.cpu(), s.relu(), rtol=0, atol=0, equal_nan=True)


def test_a_tangent_goes_through_a_relu():
    t, y, x = noise(3, 700), noise(3, 700, seed=1), noise(3, 700, seed=2).relu()
    assert torch.equal(kernels.meet(*on(t, y, x)).cpu(), (x > 0) * (t + y))


@pytest.mark.parametrize(("rows", "classes"), [(6, 10), (3, 1), (5, 300), (1, 4)])
def test_cross_entropy_and_its_derivative(rows, classes):
    x, t = 30 * noise(rows, classes), noise(rows, classes, seed=1)
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(0))
    target[rows // 2] = -7
    wanted = lambda s: torch.nn.functional.cross_entropy(s, target, ignore_index=-7, reduction="none")  # noqa: E731
    expected, moved = torch.func.jvp(wanted, (x.double(),), (t.double(),))
    found, slope = kernels.cross_entropy(*on(x, t, target), -7)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope.cpu().double(), moved, rtol=1e-5, atol=1e-5)
    target[0] = classes
    assert kernels.cross_entropy(*on(x, t, target), -7)[0][0].isnan()


def test_gram_matrices_of_open_units():
    gate = (noise(5, 70, seed=1) > 0) * noise(5, 70, seed=2)
    small = Compact.of(ClosedForm(noise(50, 70), gate))
    found = kernels.gram(*on(small.product, small.index, small.gate)).cpu()
    torch.testing.assert_close(found, small.gram())


@pytest.fixture
def everywhere(monkeypatch):
    """The kernels are used on this machine too, where a GPU would use them."""
    monkeypatch.setattr(kernels, "usable", lambda t, k=1: t.dtype == torch.float32 and k <= kernels.LARGEST)


def small_step(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).to(DEVICE)
    forward = gg.ForwardGradient(model, gg.WPerp(k=3), seed=1)
    x, target = noise(7, 6).to(DEVICE), torch.arange(7, device=DEVICE) % 3
    loss = forward(nn.CrossEntropyLoss(reduction="none"), x, target)
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.skipif(DEVICE == "cuda", reason="compares the path of a CPU with that of a GPU")
def test_a_step_on_the_path_of_a_gpu_is_that_of_a_cpu(monkeypatch):
    used = []
    plain = small_step()
    for name in ("rectify", "meet", "weigh"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *args, _n=name, _f=real: used.append(_n) or _f(*args))
    monkeypatch.setattr(kernels, "usable", lambda t, k=1: t.dtype == torch.float32)
    for a, b in zip(plain, small_step(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert set(used) == {"rectify", "meet", "weigh"}


def test_subspaces_found_with_kernels_alone(everywhere):
    """On a GPU nothing of `steady_top_subspace` waits; here in the interpreter, one direction ten times the others."""
    A = noise(3, 40, 40)
    A[1] += 40**0.5 * 10 * torch.outer(noise(40, seed=1), noise(40, seed=2)) / 40
    G = A.mT @ A / 40
    V, values = linalg.steady_top_subspace(*on(G, noise(3, 40, 16, seed=3)), 4, (2, 4, 4))
    exact, vectors = torch.linalg.eigh(G.double())
    V, P = V.cpu().double(), vectors[..., -4:] @ vectors[..., -4:].mT
    assert torch.linalg.matrix_norm(V @ V.mT - P, 2).max() < 2e-2
    torch.testing.assert_close(values.cpu().double(), exact[:, -4:].flip(-1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 1}, {"label_smoothing": 0.1}, {"weight": torch.ones(4)}])
def test_the_rule_for_cross_entropy(options, everywhere, monkeypatch):
    """With options that the kernel does not know, PyTorch's own formula."""
    x, t, target = *on(noise(5, 4), noise(5, 4, seed=1)), torch.tensor([0, 1, 2, 3, 1], device=DEVICE)
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    used = []
    real = kernels.cross_entropy
    monkeypatch.setattr(kernels, "cross_entropy", lambda *args: used.append(1) or real(*args))

    def loss(s: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(s, target, reduction="none", **options)

    def dual() -> tuple[Tensor, Tensor]:
        with torch.no_grad(), fwAD.dual_level():
            return tuple(fwAD.unpack_dual(loss(fwAD.make_dual(x, t))))

    expected = dual()
    with TangentRules():
        found = dual()
    assert bool(used) == (set(options) <= {"ignore_index"})
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_only_a_gpu_and_float32_are_served():
    assert not kernels.usable(torch.zeros(1), 4)
    assert kernels.usable(torch.zeros(1, device="cuda"), 4) if DEVICE == "cuda" else True


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("d", [64, kernels.FUSED + 8])
def test_the_frame_uses_them(d):
    V, gate = basis_and_gate(5, d, 4)
    frame = GatedBasis(*on(V, gate), 4)
    z = noise(2, 4, 5, seed=3)
    expected = GatedBasis(V.double(), gate.double(), 4).apply(z.double())
    torch.testing.assert_close(frame.apply(z.to(DEVICE)).cpu().double(), expected, rtol=1e-4, atol=1e-5)
