// Vectors are arrays of numbers, matrices are arrays of rows.

const EPS = 2 ** -52;

const zeros = (n) => new Array(n).fill(0);
const times = (factor, v) => v.map((x) => factor * x);
const minus = (a, b) => a.map((x, i) => x - b[i]);
const norm = (v) => Math.sqrt(dot(v, v));

function dot(a, b) {
  let total = 0;
  for (let i = 0; i < a.length; i++) total += a[i] * b[i];
  return total;
}

/** a += factor * b, in place. */
function addTo(a, factor, b) {
  for (let i = 0; i < a.length; i++) a[i] += factor * b[i];
}

const multiply = (A, x) => A.map((row) => dot(row, x));

/** Aᵀ x. */
function multiplyTransposed(A, x) {
  const out = zeros(A[0].length);
  A.forEach((row, i) => addTo(out, x[i], row));
  return out;
}

/** The same vectors made orthonormal in order; zero where one depends on those before it. */
function gramSchmidt(vectors) {
  const largest = Math.max(0, ...vectors.map(norm));
  const least = 10 * (vectors.length + Math.sqrt(vectors[0].length)) * EPS * largest;
  const done = [];
  for (const v of vectors) {
    const rest = v.slice();
    for (let pass = 0; pass < 2; pass++) for (const q of done) addTo(rest, -dot(q, rest), q); // twice is enough
    const left = norm(rest);
    done.push(left > least ? times(1 / left, rest) : zeros(v.length));
  }
  return done;
}

/** Rotate pairs of vectors until all are orthogonal to each other (one-sided Jacobi); `others` turn with them. */
function orthogonalise(vectors, others) {
  const least = EPS * EPS * vectors.reduce((total, v) => total + dot(v, v), 0); // below it a vector is rounding
  for (let sweep = 0, turned = true; turned && sweep < 60; sweep++) {
    turned = false;
    for (let p = 0; p < vectors.length; p++) {
      for (let q = p + 1; q < vectors.length; q++) {
        const a = dot(vectors[p], vectors[p]), b = dot(vectors[q], vectors[q]), c = dot(vectors[p], vectors[q]);
        if (Math.min(a, b) <= least || Math.abs(c) <= EPS * Math.sqrt(a * b)) continue;
        const zeta = (b - a) / (2 * c);
        const tangent = (zeta < 0 ? -1 : 1) / (Math.abs(zeta) + Math.hypot(1, zeta));
        const cosine = 1 / Math.hypot(1, tangent);
        rotate(vectors[p], vectors[q], cosine, cosine * tangent);
        if (others) rotate(others[p], others[q], cosine, cosine * tangent);
        turned = true;
      }
    }
  }
}

function rotate(a, b, cosine, sine) {
  for (let i = 0; i < a.length; i++) {
    const x = a[i];
    a[i] = cosine * x - sine * b[i];
    b[i] = sine * x + cosine * b[i];
  }
}

/**
 * Singular values and right singular vectors of A (m × n), min(m, n) of them, the largest first.
 * Vectors of singular value zero are zero. The entry of largest size of a vector is positive.
 */
function svd(A) {
  const m = A.length, n = A[0].length, count = Math.min(m, n);
  const open = [...Array(n).keys()].filter((j) => A.some((row) => row[j] !== 0)); // a closed unit has an empty column
  let pairs = [];
  if (open.length && m < open.length) {
    const rows = A.map((row) => open.map((j) => row[j]));
    orthogonalise(rows);
    pairs = rows.map((row) => [norm(row), times(1 / (norm(row) || 1), row)]);
  } else if (open.length) {
    const columns = open.map((j) => A.map((row) => row[j]));
    const V = open.map((_, i) => open.map((_, j) => Number(i === j)));
    orthogonalise(columns, V);
    pairs = columns.map((column, j) => [norm(column), V[j]]);
  }
  pairs.sort((a, b) => b[0] - a[0]);
  const values = zeros(count), vectors = values.map(() => zeros(n));
  pairs.slice(0, count).forEach(([value, v], i) => {
    values[i] = value;
    if (!(value > pairs[0][0] * Math.max(m, n) * EPS)) return;
    const peak = v.reduce((best, x) => (Math.abs(x) > Math.abs(best) ? x : best), 0);
    open.forEach((j, position) => (vectors[i][j] = Math.sign(peak) * v[position]));
  });
  return { values, vectors };
}
