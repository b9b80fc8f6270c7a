use burn::tensor::{DType, Device, Int, Tensor};
use kv_kernels::{
    HeadLayout, HeadNorms, KernelError, Placement, RotaryTable, SlotPool, SlotRanges, split_heads,
    split_keys_values, write_heads,
};
use kv_testing::{Numbers, devices, relative_error};

const POSITIONS: usize = 50;
const EPSILON: f32 = 1e-5;

/// Query heads, key-value heads, head dim.
const CASES: [[usize; 3]; 6] =
    [[1, 1, 32], [8, 1, 64], [6, 2, 96], [8, 8, 128], [8, 2, 256], [3, 1, 6]];

struct Case {
    layout: HeadLayout,
    /// As f64: cosines, sines, the queries' and the keys' norm.
    tables: [Vec<f64>; 4],
    numbers: Numbers,
    device: Device,
    dtype: DType,
}

fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as::<f32>().unwrap().into_iter().map(f64::from).collect()
}

impl Case {
    fn new(
        dims: [usize; 3],
        rotates: bool,
        normalises: bool,
        device: &Device,
        dtype: DType,
    ) -> Self {
        let [query_heads, kv_heads, head_dim] = dims;
        let mut numbers = Numbers::new(9);
        let mut table = || numbers.tensor([POSITIONS, head_dim / 2], device);
        let rope = RotaryTable { cos: table(), sin: table() };
        let mut norm = || numbers.tensor([1, head_dim], device).cast(dtype).reshape([head_dim]);
        let norms = HeadNorms { query: norm(), key: norm(), epsilon: EPSILON };
        let tables = [
            read(rope.cos.clone()),
            read(rope.sin.clone()),
            read(norms.query.clone()),
            read(norms.key.clone()),
        ];
        let layout = HeadLayout {
            query_heads,
            kv_heads,
            head_dim,
            rope: rotates.then_some(rope),
            norms: normalises.then_some(norms),
        };
        Self { layout, tables, numbers, device: device.clone(), dtype }
    }

    fn projected(&mut self, tokens: usize) -> Tensor<2> {
        self.numbers.tensor([tokens, self.layout.width()], &self.device).cast(self.dtype)
    }

    fn ints<const D: usize>(&self, values: &[i32], shape: [usize; D]) -> Tensor<D, Int> {
        Tensor::<1, Int>::from_data(values, (&self.device, DType::I32)).reshape(shape)
    }

    /// Head `head` of a projected row, in f64.
    fn head(&self, row: &[f64], head: usize, position: usize) -> Vec<f64> {
        let HeadLayout { query_heads, kv_heads, head_dim, .. } = self.layout;
        let mut x = row[head * head_dim..][..head_dim].to_vec();
        if head >= query_heads + kv_heads {
            return x;
        }
        if self.layout.norms.is_some() {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
            let weights = &self.tables[if head < query_heads { 2 } else { 3 }];
            for (x, weight) in x.iter_mut().zip(weights) {
                *x *= weight / (mean + f64::from(EPSILON)).sqrt();
            }
        }
        if self.layout.rope.is_some() {
            let half = head_dim / 2;
            for i in 0..half {
                let (cos, sin) =
                    (self.tables[0][position * half + i], self.tables[1][position * half + i]);
                let (a, b) = (x[i], x[i + half]);
                x[i] = a * cos - b * sin;
                x[i + half] = b * cos + a * sin;
            }
        }
        x
    }
}

/// Every combination of options on every device and dtype.
fn cases(run: impl Fn(&mut Case, &str, f64)) {
    for tested in devices() {
        for dtype in tested.float_dtypes() {
            for dims in CASES {
                for (rotates, normalises) in [(true, false), (true, true), (false, false)] {
                    let context =
                        format!("{} {dtype:?} {dims:?} {rotates} {normalises}", tested.name);
                    let limit = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                    let mut case = Case::new(dims, rotates, normalises, &tested.device, dtype);
                    run(&mut case, &context, limit);
                }
            }
        }
    }
}

#[test]
fn heads_are_split_normalised_and_rotated() {
    cases(|case, context, limit| {
        let (batch, tokens) = (2, 5);
        let projected = case.projected(batch * tokens);
        let rows = read(projected.clone());
        let at: Vec<i32> = (0..(batch * tokens) as i32).map(|i| i * 7 % POSITIONS as i32).collect();
        let positions = case.ints(&at, [batch, tokens]);
        let parts = split_heads(projected, positions, &case.layout).unwrap();
        let HeadLayout { query_heads, kv_heads, .. } = case.layout;
        let counts = [query_heads, kv_heads, kv_heads];
        let mut first = 0;
        for (part, count) in parts.into_iter().zip(counts) {
            let mut expected = Vec::new();
            for sequence in 0..batch {
                for head in first..first + count {
                    for token in sequence * tokens..(sequence + 1) * tokens {
                        let row = &rows[token * case.layout.width()..];
                        expected.extend(case.head(row, head, at[token] as usize));
                    }
                }
            }
            let error = relative_error(&part.try_into_vec_as::<f32>().unwrap(), &expected);
            assert!(error < limit, "{context}: heads from {first} off by {error}");
            first += count;
        }
    });
}

/// Rows of keys and values alone give the same as joint ones.
#[test]
fn keys_and_values_are_split_without_queries() {
    cases(|case, context, _| {
        let (batch, tokens) = (2, 5);
        let projected = case.projected(batch * tokens);
        let at: Vec<i32> = (0..(batch * tokens) as i32).map(|i| i * 7 % POSITIONS as i32).collect();
        let positions = case.ints(&at, [batch, tokens]);
        let queries = case.layout.query_heads * case.layout.head_dim;
        let width = case.layout.width();
        let rows = projected.clone().narrow(1, queries, width - queries);
        let [_, key, value] =
            split_heads(projected.clone(), positions.clone(), &case.layout).unwrap();
        let parts = split_keys_values(rows, positions.clone(), &case.layout).unwrap();
        for (part, expected) in parts.into_iter().zip([key, value]) {
            assert_eq!(part.dims(), expected.dims());
            assert_eq!(read(part), read(expected), "{context}");
        }
        let error = split_keys_values(projected, positions, &case.layout).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "projected", .. }), "{error}");
    });
}

/// Appended and overwritten slots hold the token, all others what they held.
#[test]
fn tokens_are_written_into_their_slots() {
    cases(|case, context, limit| {
        let HeadLayout { query_heads, kv_heads, head_dim, .. } = case.layout;
        let batch = 2;
        let pairs = batch * kv_heads;
        let capacity = 4;
        let slots = pairs * capacity;
        let projected = case.projected(batch);
        let rows = read(projected.clone());
        let at = [3, 41];
        for place in ["append", "next"] {
            let device = case.device.clone();
            let mut keys = case.numbers.tensor([slots, head_dim], &device).cast(case.dtype);
            let mut values = case.numbers.tensor([slots, head_dim], &device).cast(case.dtype);
            let mut positions = case.ints(&vec![-5; slots], [slots]);
            let mut log_weights = Tensor::<1>::full([slots], 2.0, (&device, DType::F32));
            let mut expected = [read(keys.clone()), read(values.clone())];
            let lengths: Vec<i32> = (0..pairs as i32).map(|pair| pair % capacity as i32).collect();
            let offsets: Vec<i32> = (0..pairs as i32).map(|pair| pair * capacity as i32).collect();
            // Every other place is the first slot; that of an empty head is behind its slots too.
            let places: Vec<i32> =
                (0..pairs).map(|pair| if pair % 2 == 0 { lengths[pair] } else { 0 }).collect();
            let to = (0..pairs).map(|pair| match place {
                "next" => offsets[pair] + places[pair],
                _ => offsets[pair] + lengths[pair],
            });
            let to: Vec<i32> = to.collect();
            // Lengths with gaps between rows, as devices that pad rows have them.
            let gap = case.ints(&vec![-99; pairs], [batch, kv_heads]);
            let padded = Tensor::cat(vec![case.ints(&lengths, [batch, kv_heads]), gap], 1);
            let mut ranges = SlotRanges {
                offsets: case.ints(&offsets, [batch, kv_heads]),
                lengths: padded.narrow(1, 0, kv_heads),
            };
            let pool = SlotPool {
                keys: &mut keys,
                values: &mut values,
                positions: &mut positions,
                log_weights: Some(&mut log_weights),
            };
            let next = case.ints(&places, [batch, kv_heads]);
            let mut log_norms = Tensor::<1>::full([slots], 7.0, (&device, DType::F32));
            let placement = match place {
                "append" => Placement::Append(&mut ranges),
                _ => Placement::Next {
                    ranges: &mut ranges,
                    places: &next,
                    log_norms: &mut log_norms,
                },
            };
            let now = case.ints(&at, [batch]);
            let query = write_heads(projected.clone(), now, &case.layout, pool, placement).unwrap();

            let mut queries = Vec::new();
            let (mut new_positions, mut weights) = (vec![-5; slots], vec![2.0f32; slots]);
            for sequence in 0..batch {
                let row = &rows[sequence * case.layout.width()..];
                let head = |head| case.head(row, head, at[sequence] as usize);
                queries.extend((0..query_heads).flat_map(head));
                for kv_head in 0..kv_heads {
                    let slot = to[sequence * kv_heads + kv_head] as usize;
                    for (part, expected) in expected.iter_mut().enumerate() {
                        let row = head(query_heads + part * kv_heads + kv_head);
                        expected[slot * head_dim..][..head_dim].copy_from_slice(&row);
                    }
                    new_positions[slot] = at[sequence];
                    weights[slot] = 0.0;
                }
            }
            let context = format!("{context} {place}");
            let query = query.try_into_vec_as::<f32>().unwrap();
            let error = relative_error(&query, &queries);
            assert!(error < limit, "{context}: queries off by {error}");
            let mut norms = vec![7.0f64; slots];
            for &slot in to.iter().filter(|_| place == "next") {
                let row = &expected[1][slot as usize * head_dim..][..head_dim];
                norms[slot as usize] = row.iter().map(|x| x.abs()).sum::<f64>().ln();
            }
            let error = relative_error(&log_norms.try_into_vec_as::<f32>().unwrap(), &norms);
            assert!(error < limit, "{context}: norms off by {error}");
            for (pool, expected) in [keys, values].into_iter().zip(&expected) {
                let pool = pool.try_into_vec_as::<f32>().unwrap();
                let error = relative_error(&pool, expected);
                assert!(error < limit, "{context}: pool off by {error}");
            }
            assert_eq!(positions.try_into_vec_as::<i32>().unwrap(), new_positions, "{context}");
            assert_eq!(log_weights.try_into_vec_as::<f32>().unwrap(), weights, "{context}");
            let grown = |pair: usize| match place {
                "append" => true,
                _ => places[pair] == lengths[pair],
            };
            let grown: Vec<i32> =
                (0..pairs).map(|pair| lengths[pair] + i32::from(grown(pair))).collect();
            assert_eq!(ranges.lengths.try_into_vec_as::<i32>().unwrap(), grown, "{context}");
        }
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    for tested in devices() {
        let mut case = Case::new([4, 2, 8], true, true, &tested.device, DType::F32);
        let projected = case.projected(2);
        let positions = || case.ints(&[0, 1], [1, 2]);
        let wide = HeadLayout { query_heads: 6, ..case.layout.clone() };
        let error = split_heads(projected.clone(), positions(), &wide).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "projected", .. }), "{error}");
        let odd = HeadLayout { query_heads: 3, ..case.layout.clone() };
        let error = split_heads(projected.clone(), positions(), &odd).unwrap_err();
        assert!(matches!(error, KernelError::HeadGroups { .. }), "{error}");
        let rope = RotaryTable {
            cos: Tensor::zeros([9, 4], &tested.device),
            sin: Tensor::zeros([9, 3], &tested.device),
        };
        let uneven = HeadLayout { rope: Some(rope), ..case.layout.clone() };
        let error = split_heads(projected, positions(), &uneven).unwrap_err();
        assert!(matches!(error, KernelError::Shape { argument: "sines", .. }), "{error}");
    }
}
