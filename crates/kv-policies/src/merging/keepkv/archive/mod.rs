//! The host tier of single layers: all tokens that a compressed cache stands for.
//!
//! Threads of their own make the copies. Each has a stream of the device to itself, so that copies
//! run beside the kernels of other threads. Data from a CUDA device stays in the page-locked memory
//! that it was read into, and is written back from there without another copy.

mod copier;

use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use copier::{Coming, Direction};
use kv_core::{
    Error, HostState, LayerCache, PolicyState, Result, StateBytes, expect_shape, states_of,
};

/// New tokens that are gathered on the device before they are copied to the host.
const GATHERED: usize = 64;

/// A layer's complete keys and values in host memory, whatever the cache on the device keeps of
/// them.
#[derive(Debug, Clone)]
pub struct Archive {
    device: Device,
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
    runs: Vec<Run>,
    /// Tokens behind the prompts.
    pushed: usize,
    transfers: Transfers,
}

/// The copies back to the device so far, and their times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Transfers {
    /// The number of copies, each of all tokens of some sequences.
    pub count: usize,
    /// The time that the copies took.
    pub copying: Duration,
    /// The part of this time that steps waited.
    pub waiting: Duration,
}

/// Sequences that came with equally long prompts.
#[derive(Debug, Clone)]
struct Run {
    rows: usize,
    tokens: usize,
    /// In the order of tokens.
    segments: Vec<Coming<Segment<TensorData>>>,
    /// New tokens that are still on the device.
    gathered: Option<Gathered>,
    /// A copy to the device that was begun ahead, and the number of tokens in it.
    ahead: Option<(usize, Coming<(Complete, Duration)>)>,
}

/// Tokens of a run: keys and values `[b, Hkv, n, D]`, positions `[b, n]`.
#[derive(Debug, Clone)]
struct Segment<K, P = K> {
    keys: K,
    values: K,
    positions: P,
}

/// The last tokens of a run, in tensors with room for more: neither adding a token nor reading all
/// needs one launch for each token.
#[derive(Debug, Clone)]
struct Gathered {
    buffers: OnDevice,
    count: usize,
}

/// All tokens of some sequences, on the device.
#[derive(Debug, Clone)]
pub struct Complete {
    /// The number of sequences, which follow the sequences of the runs before.
    pub rows: usize,
    /// `[b, Hkv, T, D]`
    pub keys: Tensor<4>,
    /// `[b, Hkv, T, D]`
    pub values: Tensor<4>,
    /// Logical positions, `[b, T]`.
    pub positions: Tensor<2, Int>,
}

impl Archive {
    /// Begins to copy a prompt to the host.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, T, D]`; `positions` `[B, T]`.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn new(
        keys: &Tensor<4>,
        values: &Tensor<4>,
        positions: &Tensor<2, Int>,
        dtype: DType,
    ) -> Result<Self> {
        let [rows, kv_heads, tokens, head_dim] = keys.dims();
        expect_shape("values", &values.dims(), &keys.dims())?;
        expect_shape("positions", &positions.dims(), &[rows, tokens])?;
        let prompt = Segment {
            keys: keys.clone().cast(dtype),
            values: values.clone().cast(dtype),
            positions: positions.clone().cast(DType::I32),
        };
        let run =
            Run { rows, tokens, segments: vec![download(prompt)], gathered: None, ahead: None };
        Ok(Self {
            device: keys.device(),
            kv_heads,
            head_dim,
            dtype,
            runs: vec![run],
            pushed: 0,
            transfers: Transfers::default(),
        })
    }

    /// Tokens of every sequence.
    pub fn tokens(&self) -> Vec<usize> {
        let runs = self.runs.iter();
        runs.flat_map(|run| std::iter::repeat_n(run.tokens, run.rows)).collect()
    }

    /// Tokens that were added behind the prompts.
    pub fn pushed(&self) -> usize {
        self.pushed
    }

    /// Bytes of keys and values that are, or are about to be, in host memory.
    pub fn host_bytes(&self) -> usize {
        self.bytes_of(|run| run.tokens - run.on_device())
    }

    /// Bytes of keys and values on the device: the buffers of the last tokens, and copies that were
    /// begun ahead.
    pub fn device_bytes(&self) -> usize {
        let buffered =
            |run: &Run| run.gathered.as_ref().map_or(0, |own| own.buffers.keys.dims()[2]);
        self.bytes_of(|run| buffered(run) + run.ahead.as_ref().map_or(0, |(tokens, _)| *tokens))
    }

    fn bytes_of(&self, tokens: impl Fn(&Run) -> usize) -> usize {
        let row = 2 * self.kv_heads * self.head_dim * self.dtype.size();
        self.runs.iter().map(|run| run.rows * tokens(run) * row).sum()
    }

    /// Adds one token to every sequence, without waiting for anything.
    ///
    /// # Shapes
    /// `keys`, `values` `[B, Hkv, D]`; `positions` `[B]`.
    ///
    /// # Errors
    /// [`Error::Shape`].
    pub fn push(
        &mut self,
        keys: Tensor<3>,
        values: Tensor<3>,
        positions: Tensor<1, Int>,
    ) -> Result<()> {
        let batch: usize = self.runs.iter().map(|run| run.rows).sum();
        let shape = [batch, self.kv_heads, self.head_dim];
        expect_shape("keys", &keys.dims(), &shape)?;
        expect_shape("values", &values.dims(), &shape)?;
        expect_shape("positions", &positions.dims(), &[batch])?;
        let mut first = 0;
        for run in &mut self.runs {
            let own = |tensor: &Tensor<3>| {
                tensor.clone().narrow(0, first, run.rows).unsqueeze_dim(2).cast(self.dtype)
            };
            let positions = positions.clone().narrow(0, first, run.rows).unsqueeze_dim(1);
            let positions = positions.cast(DType::I32);
            run.gather(Segment { keys: own(&keys), values: own(&values), positions });
            run.tokens += 1;
            // A prefetch under way would lack the tokens that are copied now.
            if run.ahead.is_none() {
                run.flush_full();
            }
            first += run.rows;
        }
        self.pushed += 1;
        Ok(())
    }

    /// Begins to copy everything back to the device; [`Self::fetch`] then only waits for the rest
    /// of the copy.
    pub fn prefetch(&mut self) {
        for run in &mut self.runs {
            run.ahead = Some(run.upload(&self.device));
        }
    }

    /// All tokens on the device, run after run of sequences with equally many tokens.
    ///
    /// # Errors
    /// [`Error::Read`] where a copy failed.
    pub fn fetch(&mut self) -> Result<Vec<Complete>> {
        let (device, transfers) = (&self.device, &mut self.transfers);
        self.runs.iter_mut().map(|run| run.fetch(device, transfers)).collect()
    }

    /// The copies back to the device so far.
    pub fn transfers(&self) -> Transfers {
        self.transfers
    }

    /// The archive for another device, with nothing left on this one.
    fn moved_to(mut self, device: &Device) -> Self {
        for run in &mut self.runs {
            run.flush();
            run.ahead = None;
        }
        Self { device: device.clone(), ..self }
    }
}

impl PolicyState for Archive {
    fn name(&self) -> &'static str {
        "archive"
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(self.clone()))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(self.clone().moved_to(device)))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let own = [self.kv_heads, self.head_dim];
        let mut joined = self.clone();
        for part in states_of::<Self>(self, others)?.into_iter().skip(1) {
            expect_shape("archived keys", &[part.kv_heads, part.head_dim], &own)?;
            joined.runs.extend(part.runs.iter().cloned());
        }
        Ok(Box::new(joined))
    }

    fn is_savable(&self) -> bool {
        false
    }

    /// An archive is in host memory anyway, and no file holds it.
    fn to_host(&self) -> Result<Option<HostState>> {
        Ok(Some(HostState::Kept(Box::new(self.clone().moved_to(&self.device)))))
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        StateBytes { device: self.device_bytes(), host: self.host_bytes(), scratch: 0 }
    }
}

impl Run {
    /// How many tokens are still on the device.
    fn on_device(&self) -> usize {
        self.gathered.as_ref().map_or(0, |own| own.count)
    }

    /// Adds one token to those on the device.
    fn gather(&mut self, token: OnDevice) {
        let own = match self.gathered.take() {
            Some(own) => own,
            None => Gathered { buffers: buffers_like(&token), count: 0 },
        };
        self.gathered = Some(own.with(token));
    }

    /// Begins to copy the gathered tokens to the host.
    fn flush(&mut self) {
        if let Some(own) = self.gathered.take() {
            self.segments.push(download(own.tokens()));
        }
    }

    /// Begins to copy the gathered tokens if there are many.
    fn flush_full(&mut self) {
        if self.on_device() >= GATHERED {
            self.flush();
        }
    }

    /// Begins to copy all that is in host memory to the device.
    fn upload(&self, device: &Device) -> (usize, Coming<(Complete, Duration)>) {
        let (segments, device, rows) = (self.segments.clone(), device.clone(), self.rows);
        let coming = Coming::start(Direction::ToDevice, move || {
            let start = Instant::now();
            let segments = segments.iter().map(|segment| {
                let segment = segment.wait()?;
                let floats =
                    |data: &TensorData| Tensor::from_data(data.clone(), (&device, data.dtype()));
                Ok(Segment {
                    keys: floats(&segment.keys),
                    values: floats(&segment.values),
                    positions: Tensor::from_data(segment.positions.clone(), (&device, DType::I32)),
                })
            });
            let all = joined(segments.collect::<std::result::Result<Vec<_>, String>>()?);
            let all = all.ok_or("an archive without tokens")?;
            // Waits for this thread's stream only, so that a step waits for the rest of the copy
            // only.
            let _ = device.sync();
            let all =
                Complete { rows, keys: all.keys, values: all.values, positions: all.positions };
            Ok((all, start.elapsed()))
        });
        (self.tokens - self.on_device(), coming)
    }

    fn fetch(&mut self, device: &Device, transfers: &mut Transfers) -> Result<Complete> {
        let ahead = match self.ahead.take() {
            // The tokens gathered since then follow the copied ones.
            Some((copied, ahead)) if copied + self.on_device() == self.tokens => ahead,
            _ => self.upload(device).1,
        };
        let read = |reason: String| Error::Read { what: "archive", reason };
        let start = Instant::now();
        let (complete, copying) = ahead.wait().map_err(read)?.clone();
        transfers.count += 1;
        transfers.copying += copying;
        transfers.waiting += start.elapsed();
        let Complete { rows, keys, values, positions } = complete;
        let mut all = vec![Segment { keys, values, positions }];
        all.extend(self.gathered.as_ref().map(Gathered::tokens));
        self.flush_full();
        let all = joined(all).ok_or_else(|| read("an archive without tokens".into()))?;
        Ok(Complete { rows, keys: all.keys, values: all.values, positions: all.positions })
    }
}

type OnDevice = Segment<Tensor<4>, Tensor<2, Int>>;

impl Gathered {
    /// Adds one token, in place as long as there is room.
    fn with(self, token: OnDevice) -> Self {
        let Self { buffers, count } = self;
        let buffers = match buffers.keys.dims()[2] {
            full if full == count => {
                let more = buffers_like(&token);
                Segment {
                    keys: Tensor::cat(vec![buffers.keys, more.keys], 2),
                    values: Tensor::cat(vec![buffers.values, more.values], 2),
                    positions: Tensor::cat(vec![buffers.positions, more.positions], 1),
                }
            }
            _ => buffers,
        };
        let [rows, heads, _, head_dim] = token.keys.dims();
        let at = [0..rows, 0..heads, count..count + 1, 0..head_dim];
        let buffers = Segment {
            keys: buffers.keys.slice_assign(at.clone(), token.keys),
            values: buffers.values.slice_assign(at, token.values),
            positions: buffers.positions.slice_assign([0..rows, count..count + 1], token.positions),
        };
        Self { buffers, count: count + 1 }
    }

    fn tokens(&self) -> OnDevice {
        let Self { buffers, count } = self;
        Segment {
            keys: buffers.keys.clone().narrow(2, 0, *count),
            values: buffers.values.clone().narrow(2, 0, *count),
            positions: buffers.positions.clone().narrow(1, 0, *count),
        }
    }
}

/// Empty buffers for [`GATHERED`] tokens like `token`.
fn buffers_like(token: &OnDevice) -> OnDevice {
    let [rows, heads, _, head_dim] = token.keys.dims();
    let (device, dtype) = (token.keys.device(), token.keys.dtype());
    let zeros = || Tensor::zeros([rows, heads, GATHERED, head_dim], (&device, dtype));
    let positions = Tensor::zeros([rows, GATHERED], (&device, DType::I32));
    Segment { keys: zeros(), values: zeros(), positions }
}

/// Segments one behind the other.
fn joined(mut segments: Vec<OnDevice>) -> Option<OnDevice> {
    if segments.len() <= 1 {
        return segments.pop();
    }
    let of = |part: fn(&OnDevice) -> &Tensor<4>| {
        Tensor::cat(segments.iter().map(|segment| part(segment).clone()).collect(), 2)
    };
    let positions = segments.iter().map(|segment| segment.positions.clone()).collect();
    Some(Segment {
        keys: of(|segment| &segment.keys),
        values: of(|segment| &segment.values),
        positions: Tensor::cat(positions, 1),
    })
}

/// Begins to copy tokens to the host.
fn download(tokens: OnDevice) -> Coming<Segment<TensorData>> {
    fn in_host_memory(
        data: std::result::Result<TensorData, impl ToString>,
    ) -> std::result::Result<TensorData, String> {
        let data = data.map_err(|error| error.to_string())?;
        // Reading the bytes copies them now rather than at their first use.
        let _ = &data.bytes()[..];
        let (bytes, shape, dtype) = data.into_parts();
        Ok(TensorData::from_bytes(bytes.shared(), shape, dtype))
    }
    Coming::start(Direction::ToHost, move || {
        Ok(Segment {
            keys: in_host_memory(tokens.keys.try_into_data())?,
            values: in_host_memory(tokens.values.try_into_data())?,
            positions: in_host_memory(tokens.positions.try_into_data())?,
        })
    })
}
