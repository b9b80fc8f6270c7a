use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{BalanceOptions, BalanceStrategy, Balanced, Centre, Draws, KernelError, balance};
use kv_testing::{Numbers, STEP, TestDevice, devices};

use super::strategies::force;

/// Lists of tokens to walk, on the host.
#[derive(Clone)]
struct Problem {
    dim: usize,
    slots: usize,
    keys: Vec<f32>,
    values: Option<Vec<f32>>,
    lists: Vec<Vec<usize>>,
    weights: Option<Vec<Vec<f32>>>,
    centred: bool,
    draws: Vec<Vec<f32>>,
    block: usize,
    span: usize,
    gamma: f64,
    offset: f32,
    halves: bool,
}

impl Problem {
    /// Lists of `counts` random slots each.
    fn random(seed: u64, counts: &[usize], dim: usize, block: usize) -> Self {
        let mut numbers = Numbers::new(seed);
        let slots = counts.iter().max().unwrap() + 20;
        let lists = counts.iter().map(|&count| {
            let mut slots: Vec<usize> = (0..slots).collect();
            (0..slots.len()).rev().for_each(|last| slots.swap(last, numbers.below(last + 1)));
            slots.truncate(count);
            slots
        });
        let lists: Vec<Vec<usize>> = lists.collect();
        let draws = counts.iter().map(|&count| {
            (0..count).map(|_| numbers.below(1 << 24) as f32 / (1 << 24) as f32).collect()
        });
        Self {
            draws: draws.collect(),
            dim,
            slots,
            keys: numbers.normal(slots * dim),
            values: Some(numbers.normal(slots * dim)),
            lists,
            weights: None,
            centred: false,
            block,
            span: 1,
            gamma: 0.01,
            offset: 0.025,
            halves: false,
        }
    }

    fn longest(&self) -> usize {
        self.lists.iter().map(Vec::len).max().unwrap().max(1)
    }

    /// `[P, N]`, filled up.
    fn padded<T: Copy>(&self, rows: &[Vec<T>], fill: T) -> Vec<T> {
        let longest = self.longest();
        let rows = rows.iter().flat_map(|row| {
            row.iter().copied().chain(std::iter::repeat_n(fill, longest - row.len()))
        });
        rows.collect()
    }

    fn run(&self, device: &Device, dtype: DType) -> Balanced {
        self.try_run(device, dtype).unwrap()
    }

    fn try_run(&self, device: &Device, dtype: DType) -> Result<Balanced, KernelError> {
        self.run_by(BalanceStrategy::Auto, device, dtype)
    }

    fn run_by(
        &self,
        strategy: BalanceStrategy,
        device: &Device,
        dtype: DType,
    ) -> Result<Balanced, KernelError> {
        let (rows, longest) = (self.lists.len(), self.longest());
        let floats = |values: &[f32]| Tensor::<1>::from_data(values, (device, DType::F32));
        let pool = |values: &[f32]| floats(values).reshape([self.slots, self.dim]).cast(dtype);
        let ints =
            |values: Vec<i32>| Tensor::<1, Int>::from_data(values.as_slice(), (device, DType::I32));
        let lists: Vec<Vec<i32>> =
            self.lists.iter().map(|list| list.iter().map(|&slot| slot as i32).collect()).collect();
        let options = BalanceOptions {
            block: self.block,
            span: self.span,
            scale: None,
            log_gamma: floats(&vec![self.gamma.ln() as f32; rows]),
            value_offset: self.offset,
            centre: if self.centred { Centre::List } else { Centre::None },
            weights: self
                .weights
                .as_ref()
                .map(|weights| floats(&self.padded(weights, 0.0)).reshape([rows, longest])),
            draws: Draws::Numbers(floats(&self.padded(&self.draws, 0.0)).reshape([rows, longest])),
            halves: self.halves,
            strategy,
        };
        balance(
            pool(&self.keys),
            self.values.as_deref().map(pool),
            ints(self.padded(&lists, 0)).reshape([rows, longest]),
            ints(self.lists.iter().map(|list| list.len() as i32).collect()),
            options,
        )
    }

    /// The mean key of a list.
    fn mean(&self, row: usize) -> Vec<f64> {
        let list = &self.lists[row];
        let columns = (0..self.dim).map(|column| {
            let keys = list.iter().map(|slot| f64::from(self.keys[slot * self.dim + column]));
            keys.sum::<f64>() / list.len().max(1) as f64
        });
        columns.collect()
    }

    /// The places of each span of a block of `tokens`: pairs of whole spans while there are enough
    /// tokens, then the rest in two.
    fn spans(&self, tokens: usize) -> Vec<Range<usize>> {
        let mut sizes = Vec::new();
        let mut left = tokens;
        while left >= 2 * self.span {
            sizes.extend([self.span; 2]);
            left -= 2 * self.span;
        }
        sizes.extend([left - left / 2, left / 2]);
        let mut first = 0;
        let spans = sizes.into_iter().map(|size| {
            first += size;
            first - size..first
        });
        spans.filter(|span| !span.is_empty()).collect()
    }

    /// The paper's walk, literally, for one list: sums over all tokens of the block before. `None`
    /// from the first decision on that rounding may turn. With spans the sums are over all pairs of
    /// a token of the span and one before the span.
    fn signs(&self, row: usize) -> Vec<Vec<Option<i32>>> {
        let list = &self.lists[row];
        let dot = |pool: &[f32], a: usize, b: usize, mean: &[f64]| -> f64 {
            let [a, b] = [a, b].map(|slot| &pool[slot * self.dim..][..self.dim]);
            let terms = a.iter().zip(b).enumerate();
            terms
                .map(|(i, (a, b))| {
                    let mean = mean.get(i).copied().unwrap_or_default();
                    (f64::from(*a) - mean) * (f64::from(*b) - mean)
                })
                .sum()
        };
        let mean = if self.centred { self.mean(row) } else { Vec::new() };
        let blocks = list.chunks(self.block).enumerate().map(|(index, block)| {
            let mut signs: Vec<i32> = Vec::new();
            let mut sure = true;
            let half = block.len().div_ceil(2);
            let signs = self.spans(block.len()).into_iter().flat_map(|span| {
                let (first, size) = (span.start, span.len());
                let term = |i: usize, j: usize| {
                    let factor = |at: usize| {
                        let at = index * self.block + at;
                        self.weights.as_ref().map_or(1.0, |weights| f64::from(weights[row][at]))
                    };
                    let likeness = match &self.values {
                        Some(values) => dot(values, block[i], block[j], &[]),
                        None => 1.0,
                    };
                    let logit = dot(&self.keys, block[i], block[j], &mean);
                    (logit / (self.dim as f64).sqrt()).exp()
                        * (factor(i) * factor(j) * likeness + f64::from(self.offset))
                };
                let (mut sum, mut all) = (0.0, 0.0);
                for j in span {
                    for (i, sign) in signs.iter().enumerate() {
                        let term = term(i, j);
                        sum += term * f64::from(*sign);
                        all += term.abs();
                    }
                }
                let probability = 0.5 - self.gamma * sum;
                let draw = f64::from(self.draws[row][index * self.block + first]);
                sure &= (draw - probability).abs() > 1e-5 * (1.0 + self.gamma * all);
                let mut sign = if draw < probability { 1 } else { -1 };
                let taken = signs.iter().filter(|&&other| other == sign).count();
                if self.halves && taken + size > half {
                    sign = -sign;
                }
                signs.extend(vec![sign; size]);
                vec![sure.then_some(sign); size]
            });
            signs.collect()
        });
        blocks.collect()
    }

    /// Compares a result with [`Self::signs`] and with itself; returns decisions compared.
    fn check(&self, balanced: Balanced, name: &str) -> usize {
        let ints = |tensor: Tensor<2, Int>| tensor.try_into_vec_as::<i32>().unwrap();
        let (signs, kept) = (ints(balanced.signs), ints(balanced.kept));
        let (longest, mut compared) = (self.longest(), 0);
        for (row, list) in self.lists.iter().enumerate() {
            let own = &signs[row * longest..][..longest];
            assert!(own[..list.len()].iter().all(|sign| sign.abs() == 1), "{name} row {row}");
            assert!(own[list.len()..].iter().all(|sign| *sign == 0), "{name} row {row}");
            for (expected, (own, block)) in
                self.signs(row).iter().zip(own.chunks(self.block).zip(list.chunks(self.block)))
            {
                let sure: Vec<i32> = expected.iter().map_while(|sign| *sign).collect();
                assert_eq!(own[..sure.len()], sure, "{name} row {row}");
                compared += sure.len();
                let positive = own[..block.len()].iter().filter(|&&sign| sign > 0).count();
                if self.halves {
                    assert!(positive.abs_diff(block.len() - positive) <= 1, "{name}: {positive}");
                }
            }
            // The smaller class of each block, in its half of the row.
            let half = (longest / 2).max(1);
            let mut expected = vec![-1; half];
            for (index, block) in list.chunks(self.block).enumerate() {
                let own = &own[index * self.block..][..block.len()];
                let positive = own.iter().filter(|&&sign| sign > 0).count();
                let class = if 2 * positive <= block.len() { 1 } else { -1 };
                let members = block.iter().zip(own).filter(|(_, sign)| **sign == class);
                let places = expected[index * self.block / 2..].iter_mut();
                places.zip(members).for_each(|(place, (slot, _))| *place = *slot as i32);
            }
            assert_eq!(kept[row * half..][..half], expected, "{name} row {row}");
        }
        compared
    }
}

fn on_all(test: impl FnMut(&TestDevice)) {
    devices().iter().for_each(test);
}

#[test]
fn walks_as_the_paper_says() {
    on_all(|tested| {
        for (seed, block, dim) in
            [(1, 64, 64), (2, 128, 40), (3, 256, 128), (4, 6, 7), (5, 100, 32)]
        {
            let plain = Problem::random(seed, &[300, 263, 5, 0, 1], dim, block);
            let centred = Problem { centred: true, halves: true, ..plain.clone() };
            let ones = Problem { values: None, offset: 0.0, gamma: 0.03, ..plain.clone() };
            let mut numbers = Numbers::new(seed);
            let weights = plain.lists.iter().map(|list| {
                list.iter().map(|_| 1.0 + numbers.below(3) as f32).collect::<Vec<f32>>()
            });
            let weighted = Problem { weights: Some(weights.collect()), ..centred.clone() };
            let greedy = Problem { gamma: 4.0, ..centred.clone() };
            let cases = [plain, centred, ones, weighted, greedy];
            for (case, problem) in cases.iter().enumerate() {
                let name = format!("{} block {block} case {case}", tested.name);
                let compared = problem.check(problem.run(&tested.device, DType::F32), &name);
                let all: usize = problem.lists.iter().map(Vec::len).sum();
                assert!(compared > all / 2, "{name}: {compared} of {all} decisions are sure");
            }
        }
    });
}

/// Spans of a power of two and of other numbers, blocks that a last list's end cuts anywhere, and
/// the greedy walk.
#[test]
fn walks_over_spans() {
    on_all(|tested| {
        for (seed, block, span, dim) in [(20, 64, 4, 40), (21, 96, 3, 32), (22, 128, 64, 7)] {
            let counts = [300, 263, block + 2 * span - 1, block - 1, span, 1, 0];
            let plain = Problem { span, ..Problem::random(seed, &counts, dim, block) };
            let centred = Problem { centred: true, halves: true, ..plain.clone() };
            let weights = plain.lists.iter().map(|list| vec![1.5; list.len()]);
            let weighted = Problem { weights: Some(weights.collect()), ..centred.clone() };
            let greedy = Problem { gamma: 4.0, ..centred };
            for (case, problem) in [plain, weighted, greedy].iter().enumerate() {
                let name = format!("{} block {block} span {span} case {case}", tested.name);
                let balanced = problem.run(&tested.device, DType::F32);
                let kept = balanced.kept.clone().try_into_vec_as::<i32>().unwrap();
                let compared = problem.check(balanced, &name);
                let all: usize = problem.lists.iter().map(Vec::len).sum();
                assert!(compared > all / 2, "{name}: {compared} of {all} decisions are sure");
                if problem.halves {
                    let half = problem.longest() / 2;
                    for (list, kept) in problem.lists.iter().zip(kept.chunks(half)) {
                        let kept = kept.iter().filter(|&&slot| slot >= 0).count();
                        assert_eq!(kept, list.len() / 2, "{name}");
                    }
                }
            }
        }
    });
}

/// Keys whose exponents are far apart within a span: the sums of its tokens are joined without an
/// overflow.
#[test]
fn spans_of_keys_of_any_norm_do_not_overflow() {
    on_all(|tested| {
        let mut problem = Problem { span: 4, ..Problem::random(25, &[256, 199], 32, 256) };
        for (slot, key) in problem.keys.chunks_mut(32).enumerate() {
            let own = key.iter().map(|x| x * x).sum::<f32>().sqrt();
            key.iter_mut().for_each(|x| *x *= [0.1, 8.0, 22.0][slot % 3] / own);
        }
        problem.gamma = 4.0;
        let compared = problem.check(problem.run(&tested.device, DType::F32), tested.name);
        assert!(compared > 40, "{}: {compared}", tested.name);
    });
}

fn rounded(values: &[f32], device: &Device, dtype: DType) -> Vec<f32> {
    let values = Tensor::<1>::from_data(values, (device, DType::F32));
    values.cast(dtype).cast(DType::F32).try_into_vec_as::<f32>().unwrap()
}

/// In f16 and bf16 keys are what they are: the walk over rounded keys, in f32.
#[test]
fn walks_over_halves() {
    on_all(|tested| {
        for dtype in tested.float_dtypes() {
            let (ragged, timed) = (&[257, 256, 31][..], &[STEP.slots; STEP.pairs()][..]);
            for (case, counts, block) in
                [(0, ragged, 128), (1, ragged, 256), (2, ragged, 100), (2, timed, 256)]
            {
                let mut problem = Problem::random(8, counts, STEP.head_dim, block);
                problem.keys = rounded(&problem.keys, &tested.device, dtype);
                let values = problem.values.as_deref();
                problem.values = values.map(|values| rounded(values, &tested.device, dtype));
                (problem.centred, problem.halves) = (case > 0, case > 1);
                let name = format!("{} {dtype:?} case {case}", tested.name);
                let compared = problem.check(problem.run(&tested.device, dtype), &name);
                assert!(compared > 300, "{name}: {compared}");
                let strategies = [BalanceStrategy::Portable, BalanceStrategy::TensorCore];
                let test = format!("balance in {dtype:?}");
                force(&test, tested, &strategies, &[problem], |strategy, problem| {
                    let compared =
                        problem.check(problem.run_by(strategy, &tested.device, dtype)?, &name);
                    assert!(compared > 300, "{name} {strategy:?}: {compared}");
                    Ok(())
                });
            }
        }
    });
}

/// exp of a product is up to e^141 here, and as small as its inverse.
#[test]
fn keys_of_any_norm_do_not_overflow() {
    on_all(|tested| {
        for norm in [15.0, 40.0, 200.0] {
            let mut problem = Problem::random(9, &[256, 199], 128, 256);
            for key in problem.keys.chunks_mut(128) {
                let own = key.iter().map(|x| x * x).sum::<f32>().sqrt();
                key.iter_mut().for_each(|x| *x *= norm / own);
            }
            // Some tokens alike, so that exponents are of both signs and of every size.
            for slot in (0..256).step_by(3) {
                problem.keys.copy_within(0..128, slot * 128);
            }
            problem.gamma = 4.0;
            // f64 takes e^709 only.
            if norm < 80.0 {
                let compared = problem.check(problem.run(&tested.device, DType::F32), tested.name);
                assert!(compared > 40, "{} {norm}: {compared}", tested.name);
            } else {
                let signs = problem.run(&tested.device, DType::F32).signs;
                let signs = signs.try_into_vec_as::<i32>().unwrap();
                assert_eq!(signs.iter().filter(|sign| sign.abs() == 1).count(), 455);
            }
        }
    });
}

/// Equal tokens alternate; values of zeros leave the draws alone.
#[test]
fn tokens_alike_and_zero_values() {
    on_all(|tested| {
        let mut alike = Problem::random(10, &[64], 32, 64);
        alike.keys = vec![0.5; alike.keys.len()];
        alike.values = Some(vec![1.0; alike.keys.len()]);
        alike.gamma = 4.0;
        let signs = alike.run(&tested.device, DType::F32).signs.try_into_vec_as::<i32>().unwrap();
        let sums = signs.chunks(2).map(|pair| pair.iter().sum::<i32>());
        assert!(sums.into_iter().all(|sum| sum == 0), "{}: {signs:?}", tested.name);

        let mut zeros = Problem::random(11, &[100], 32, 64);
        zeros.values = Some(vec![0.0; zeros.keys.len()]);
        (zeros.offset, zeros.gamma) = (0.0, 4.0);
        let balanced = zeros.run(&tested.device, DType::F32);
        let failed = balanced.failed.try_into_vec_as::<i32>().unwrap();
        assert_eq!(failed, [0, 0]);
        let signs = balanced.signs.try_into_vec_as::<i32>().unwrap();
        let expected = zeros.draws[0].iter().map(|&draw| if draw < 0.5 { 1 } else { -1 });
        assert!(signs.iter().copied().eq(expected), "{}", tested.name);
    });
}

#[test]
fn probabilities_that_are_none_are_reported() {
    on_all(|tested| {
        let tame = Problem { gamma: 1e-9, ..Problem::random(12, &[128, 60], 32, 64) };
        let failed = |problem: &Problem| {
            problem.run(&tested.device, DType::F32).failed.try_into_vec_as::<i32>().unwrap()
        };
        assert_eq!(failed(&tame), [0, 0, 0, 0], "{}", tested.name);
        assert_eq!(failed(&Problem { gamma: 4.0, ..tame }), [1, 1, 1, 0], "{}", tested.name);
    });
}

/// The same seed draws the same on every device, and other seeds draw otherwise.
#[test]
fn seeds_draw_alike_everywhere() {
    let signs = |device: &Device, seed: i32| {
        let problem = Problem::random(13, &[200], 16, 64);
        let keys = Tensor::<1>::from_data(problem.keys.as_slice(), (device, DType::F32));
        let lists: Vec<i32> = problem.lists[0].iter().map(|&slot| slot as i32).collect();
        let options = BalanceOptions {
            block: 64,
            span: 1,
            scale: None,
            log_gamma: Tensor::full([1], -60.0, (device, DType::F32)),
            value_offset: 0.0,
            centre: Centre::None,
            weights: None,
            draws: Draws::Seeds(Tensor::from_data([[seed, 7]], (device, DType::I32))),
            halves: false,
            strategy: BalanceStrategy::Auto,
        };
        let lists = Tensor::<1, Int>::from_data(lists.as_slice(), (device, DType::I32));
        let counts = Tensor::from_data([200], (device, DType::I32));
        let lists = lists.reshape([1, 200]);
        let keys = keys.reshape([problem.slots, 16]);
        balance(keys, None, lists, counts, options).unwrap().signs.try_into_vec_as::<i32>().unwrap()
    };
    let first = signs(&devices()[0].device, -5);
    let positive = first.iter().filter(|&&sign| sign > 0).count();
    assert!((60..140).contains(&positive), "{positive} of 200");
    on_all(|tested| {
        assert_eq!(signs(&tested.device, -5), first, "{}", tested.name);
        assert_ne!(signs(&tested.device, 6), first, "{}", tested.name);
    });
}

#[test]
fn blocks_that_cannot_be_are_refused() {
    on_all(|tested| {
        for block in [0, 1, 7, 258] {
            let problem = Problem { block, ..Problem::random(14, &[10], 8, 8) };
            let result = problem.try_run(&tested.device, DType::F32);
            let refused = matches!(result, Err(KernelError::Unsupported { .. }));
            assert_eq!(refused, block < 8 || tested.name != "cpu", "{} {block}", tested.name);
        }
        for span in [0, 3, 8] {
            let problem = Problem { span, ..Problem::random(14, &[10], 8, 8) };
            let result = problem.try_run(&tested.device, DType::F32);
            let refused = matches!(
                &result,
                Err(KernelError::Unsupported { argument: "span", actual, .. })
                    if *actual == span.to_string()
            );
            assert!(refused, "{} {span}: {result:?}", tested.name);
        }
    });
}

/// How a walk's discrepancy grows: the exponent of `n` in `‖Σ η_i exp(<q, k_i> / √D) v_i‖`, a mean
/// over queries and trials; the keys' norms make `r² / √D = 1`.
fn growth(dim: usize, valued: bool, sizes: &[usize], log_gamma: impl Fn(usize) -> f64) -> f64 {
    // Blocks of this size are the CPU's alone.
    let device = devices().into_iter().find(|tested| tested.name == "cpu").unwrap().device;
    let radius = (dim as f64).sqrt().sqrt() as f32;
    let mut points = Vec::new();
    for &size in sizes {
        let mut sum = 0.0;
        for trial in 0..4 {
            let mut problem = Problem::random(1000 + trial, &[size], dim, size);
            let unit = |rows: &mut [f32], length: f32| {
                for row in rows.chunks_mut(dim) {
                    let own = row.iter().map(|x| x * x).sum::<f32>().sqrt();
                    row.iter_mut().for_each(|x| *x *= length / own);
                }
            };
            unit(&mut problem.keys, radius);
            problem.values.iter_mut().for_each(|values| unit(values, 1.0));
            if !valued {
                problem.values = None;
            }
            (problem.offset, problem.gamma) = (0.0, log_gamma(size).exp());
            let balanced = problem.run(&device, DType::F32);
            let signs = balanced.signs.try_into_vec_as::<i32>().unwrap();
            let mut queries = Numbers::new(trial).normal(8 * dim);
            unit(&mut queries, radius);
            for query in queries.chunks(dim) {
                let mut total = vec![0.0; if valued { dim } else { 1 }];
                for (&slot, &sign) in problem.lists[0].iter().zip(&signs) {
                    let row = |pool: &[f32]| pool[slot * dim..][..dim].to_vec();
                    let logit: f32 = row(&problem.keys).iter().zip(query).map(|(k, q)| k * q).sum();
                    let weight = f64::from(sign) * (f64::from(logit) / (dim as f64).sqrt()).exp();
                    let value = problem.values.as_deref().map_or(vec![1.0], row);
                    total.iter_mut().zip(value).for_each(|(t, v)| *t += weight * f64::from(v));
                }
                sum += total.iter().map(|t| t * t).sum::<f64>().sqrt();
            }
        }
        points.push(((size as f64).ln(), sum.ln()));
    }
    let count = points.len() as f64;
    let [x, y] = [0, 1].map(|axis| {
        points.iter().map(|point| if axis == 0 { point.0 } else { point.1 }).sum::<f64>() / count
    });
    let covariance: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    covariance / points.iter().map(|point| (point.0 - x).powi(2)).sum::<f64>()
}

/// Discrepancies of balanced signs grow like log n, whose exponent falls to 0; those of random
/// signs like √n.
#[test]
fn discrepancies_do_not_grow_like_roots() {
    const DELTA: f64 = 0.01;
    let practical = growth(4, true, &[256, 1024, 4096], |_| 4f64.ln());
    let coins = growth(4, true, &[256, 1024, 4096], |_| 1e-12f64.ln());
    // Algorithm 2 to the letter, for denominators: R² = exp(r² / √D).
    let exact =
        growth(2, false, &[512, 2048, 8192], |n| -(60.0 * (n as f64 / DELTA).ln()).ln() - 1.0);
    println!("exponents: practical {practical:.2}, exact {exact:.2}, coins {coins:.2}");
    assert!((coins - 0.5).abs() < 0.12, "coins: {coins}");
    assert!(practical < 0.2, "practical: {practical}");
    assert!(exact < 0.3, "exact: {exact}");
}
