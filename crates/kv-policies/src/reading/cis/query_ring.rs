//! The last queries of every index set, for retrievals by a vote of several queries.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kv_core::{
    Error, HostState, LayerCache, LoadState, PolicyState, Result, SavedState, StateBytes,
    expect_shape, states_of,
};
use kv_kernels::scatter_rows;

/// The last `w` queries of each range, after RoPE: the query of position `p` is number `p mod w`.
#[derive(Debug)]
pub(super) struct QueryRing {
    /// `[ranges * w, G * D]`, in the cache's dtype.
    rows: Tensor<2>,
    /// The first row of each range, `[ranges]`, 32-bit.
    first: Tensor<1, Int>,
    /// `w`
    window: usize,
}

impl QueryRing {
    /// The ring of a prompt's last queries, `[ranges, N, G * D]`. The last query has position
    /// `last`. Where there are fewer than `window` queries, the first query fills the rest.
    pub(super) fn new(queries: Tensor<3>, last: usize, window: usize) -> Self {
        let [ranges, count, width] = queries.dims();
        let device = queries.device();
        // Number `n` is the query of the last position that is `n` modulo the window.
        let age = |number: usize| (last + window - number) % window;
        let from = |number: usize| count.saturating_sub(age(number) + 1) as i32;
        let order: Vec<i32> = (0..window).map(from).collect();
        let order = Tensor::<1, Int>::from_data(order.as_slice(), (&device, DType::I32));
        let rows = queries.select(1, order).reshape([ranges * window, width]);
        Self::of(rows, window)
    }

    fn of(rows: Tensor<2>, window: usize) -> Self {
        let ranges = rows.dims()[0] / window;
        let first: Vec<i32> = (0..ranges).map(|range| (range * window) as i32).collect();
        let first = TensorData::new(first, [ranges]);
        let device = rows.device();
        Self { rows, first: Tensor::from_data(first, (&device, DType::I32)), window }
    }

    /// Puts a step's queries into a cache's ring in place of its oldest, and returns all queries
    /// that vote, `[B, ranges / B * w * G, D]`.
    ///
    /// # Shapes
    /// `queries` `[ranges, G, D]`; `position`, of the newest tokens, `[B]`, 32-bit.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for a cache without a ring, [`Error::Shape`] for a ring of another
    /// window and for queries of another shape.
    pub(super) fn push(
        cache: &mut LayerCache,
        queries: Tensor<3>,
        position: &Tensor<1, Int>,
        window: usize,
    ) -> Result<Tensor<3>> {
        let batch = cache.layout().batch();
        let own = cache.policy_state_mut::<Self>().ok_or_else(|| Error::InvalidPlan {
            what: "step",
            reason: "the cache has no queries of earlier steps".into(),
        })?;
        let [ranges, group, dim] = queries.dims();
        let [rows, width] = own.rows.dims();
        expect_shape("queries of a vote", &[own.window], &[window])?;
        expect_shape("queries", &[ranges * own.window, group * dim], &[rows, width])?;
        let number = position.clone().remainder_scalar(own.window as i32);
        let each = number.unsqueeze_dim::<2>(1).expand([batch, ranges / batch]).reshape([ranges]);
        let rows = queries.reshape([ranges, width]).cast(own.rows.dtype());
        scatter_rows(&mut own.rows, own.first.clone() + each, rows)?;
        Ok(own.rows.clone().reshape([batch, ranges / batch * own.window * group, dim]))
    }
}

impl PolicyState for QueryRing {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn copied(&self) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self::of(self.rows.clone().mul_scalar(1.0), self.window)))
    }

    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>> {
        Some(Box::new(Self::of(self.rows.clone().to_device(device), self.window)))
    }

    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>> {
        let parts = states_of::<Self>(self, others)?;
        let width = |part: &Self| [part.window, part.rows.dims()[1]];
        for part in &parts {
            expect_shape("queries of a vote", &width(part), &width(self))?;
        }
        let rows = parts.iter().map(|part| part.rows.clone()).collect();
        Ok(Box::new(Self::of(Tensor::cat(rows, 0), self.window)))
    }

    fn to_host(&self) -> Result<Option<HostState>> {
        let header = (self.window, self.rows.dims());
        let read = || [("rows", self.rows.clone().cast(DType::F32).try_into_data())];
        HostState::saved(self, "queries of a vote", header, read).map(Some)
    }

    fn bytes(&self, _cache: &LayerCache) -> StateBytes {
        let [rows, width] = self.rows.dims();
        let device =
            rows * width * self.rows.dtype().size() + self.first.dims()[0] * size_of::<i32>();
        StateBytes { device, ..StateBytes::default() }
    }
}

impl LoadState for QueryRing {
    const NAME: &'static str = "query_ring";

    fn load(mut saved: SavedState, cache: &LayerCache, _seen: &[usize]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidPlan { what: "queries of a vote", reason };
        let header = std::mem::take(&mut saved.header);
        let (window, [rows, width]): (usize, [usize; 2]) =
            serde_json::from_value(header).map_err(|error| invalid(error.to_string()))?;
        let ranges = cache.layout().head_ranges();
        let whole = window.checked_mul(ranges).filter(|each| *each > 0);
        if !whole.is_some_and(|each| rows > 0 && rows.is_multiple_of(each))
            || width == 0
            || !width.is_multiple_of(cache.head_dim())
        {
            let reason = format!(
                "{rows} rows of {width} numbers, expected a multiple of {window} rows for each of \
                 {ranges} heads, of a multiple of {} numbers",
                cache.head_dim()
            );
            return Err(invalid(reason));
        }
        let rows = saved.take("rows", DType::F32, &[rows, width])?;
        let options = cache.options();
        let rows = Tensor::<2>::from_data(rows, (&options.device, DType::F32));
        Ok(Self::of(rows.cast(options.dtype), window))
    }
}
