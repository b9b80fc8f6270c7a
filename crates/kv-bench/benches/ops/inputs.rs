//! Sizes, inputs, and the clock.

use burn::tensor::{DType, Device, Int, Tensor};
use criterion::Criterion;
use kv_kernels::SlotRanges;
use kv_testing::{Numbers, STEP};

pub(crate) const BATCH: usize = STEP.batch;
pub(crate) const KV_HEADS: usize = STEP.kv_heads;
pub(crate) const GROUP: usize = STEP.group;
pub(crate) const HEAD_DIM: usize = STEP.head_dim;
pub(crate) const CAPACITY: usize = STEP.slots;
/// Tokens of a prompt.
pub(crate) const PROMPT: usize = STEP.prompt;
pub(crate) const HIDDEN: usize = 512;
pub(crate) const VOCABULARY: usize = 8192;
pub(crate) const PAIRS: usize = STEP.pairs();
pub(crate) const SLOTS: usize = PAIRS * CAPACITY;
/// Slots that a list names, and entries of a sketch's bucket.
pub(crate) const FEW: usize = CAPACITY / 8;

/// Inputs on one device.
pub(crate) struct Inputs {
    pub(crate) device: Device,
    pub(crate) numbers: Numbers,
}

impl Inputs {
    pub(crate) fn floats<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        let count = shape.iter().product();
        let values = self.numbers.normal(count);
        Tensor::<1>::from_data(values.as_slice(), (&self.device, DType::F32)).reshape(shape)
    }

    pub(crate) fn ints<const D: usize>(
        &self,
        shape: [usize; D],
        value: impl Fn(usize) -> usize,
    ) -> Tensor<D, Int> {
        let values: Vec<i32> = (0..shape.iter().product()).map(|i| value(i) as i32).collect();
        Tensor::<1, Int>::from_data(values.as_slice(), (&self.device, DType::I32)).reshape(shape)
    }

    pub(crate) fn ranges(&self, length: usize) -> SlotRanges {
        let shape = [BATCH, KV_HEADS];
        SlotRanges {
            offsets: self.ints(shape, |pair| pair * CAPACITY),
            lengths: self.ints(shape, |_| length),
        }
    }
}

/// Times `call` and the wait for it.
pub(crate) fn bench(
    criterion: &mut Criterion,
    op: &str,
    name: &str,
    device: &Device,
    mut call: impl FnMut(),
) {
    criterion.bench_function(&format!("{op}/{name}"), |bencher| {
        bencher.iter(|| {
            call();
            device.sync().unwrap();
        });
    });
}
