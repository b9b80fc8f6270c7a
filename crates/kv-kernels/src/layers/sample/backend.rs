//! The backend trait of `draw`, and its implementations for CubeCL devices and the CPU.

use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, backend_extension};
#[cfg(feature = "gpu")]
use burn_cubecl::CubeBackend;

use super::DrawConfig;
use super::args::{Drawn, SampleTensors};

#[backend_extension(Cube: cfg(feature = "gpu"), Flex: cfg(feature = "flex"))]
pub(crate) trait SampleOps: Backend {
    /// Draws a token for every row of `logits` `[B, V]`.
    fn draw(
        logits: FloatTensor<Self>,
        #[extension_type] state: SampleTensors<Self>,
        config: DrawConfig,
    ) -> Drawn<Self>;
}

#[cfg(feature = "gpu")]
impl SampleOps for CubeBackend {
    fn draw(
        logits: FloatTensor<Self>,
        state: SampleTensors<Self>,
        config: DrawConfig,
    ) -> Drawn<Self> {
        super::launch::draw(logits, state, config)
    }
}

#[cfg(feature = "flex")]
mod cpu {
    //! The implementation for the CPU, which runs the reference.

    use burn::backend::{Flex, TensorData};
    use burn_flex::FlexTensor;

    use super::SampleOps;
    use crate::backend::host_buffers::{owned, slice, slice_mut, wide};
    use crate::layers::sample::args::{Drawn, SampleTensors};
    use crate::layers::sample::reference::{Settings, sample};
    use crate::layers::sample::{DrawConfig, FLOATS, INTS};

    impl SampleOps for Flex {
        fn draw(
            logits: FlexTensor,
            state: SampleTensors<Self>,
            _config: DrawConfig,
        ) -> Drawn<Self> {
            let [rows, vocabulary] = logits.layout().shape().dims();
            let (logits, floats, ints) =
                (wide(&logits), wide(&state.floats), state.ints.to_contiguous());
            let ints = slice::<i32>(&ints).chunks_exact(INTS);
            let settings = floats.chunks_exact(FLOATS).zip(ints);
            let (mut draws, mut positions) = (owned(state.draws), owned(state.positions));
            let mut drawn = Vec::with_capacity(rows);
            let moving =
                slice_mut::<i32>(&mut draws).iter_mut().zip(slice_mut::<i32>(&mut positions));
            let rows = logits.chunks_exact(vocabulary).zip(settings).zip(moving);
            for ((logits, (floats, ints)), (draw, position)) in rows {
                let settings = Settings {
                    temperature: floats[0],
                    top_p: floats[1],
                    min_p: floats[2],
                    top_k: ints[0].unsigned_abs() as usize,
                    seed: [ints[1] as u32, ints[2] as u32],
                };
                let token = sample(logits, &settings, *draw as u32);
                drawn.push(token.map_or(-1, |token| token as i32));
                *draw += 1;
                *position += ints[3];
            }
            let mut tokens = owned(state.tokens);
            let stored = slice_mut::<i32>(&mut tokens).iter_mut().zip(&drawn);
            stored.for_each(|(token, drawn)| *token = (*drawn).max(0));
            let count = drawn.len();
            let drawn = FlexTensor::from_data(TensorData::new(drawn, [count]));
            Drawn { drawn, draws, positions, tokens }
        }
    }
}
