//! Lists that the layers of one decode step show each other.

use burn::tensor::{DType, Device, Int, Tensor};
use kv_core::{Error, Result, expect_shape};

/// Lists of all layers in one decode step, `[layers, B, Hq, 3 + M]`.
#[derive(Debug, Default)]
pub struct SharedListBoard {
    lists: Option<Tensor<4, Int>>,
    /// The number of layers that have put their lists on the board.
    published: usize,
}

impl SharedListBoard {
    /// Refuses a layer if layers before it have not put their lists on the board.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`].
    pub fn check_layer_order(&self, layer: usize) -> Result<()> {
        if self.published >= layer {
            return Ok(());
        }
        let reason = format!(
            "layer {layer} may read lists of all layers before it, {} are there in this step",
            self.published
        );
        Err(Error::InvalidPlan { what: "lists", reason })
    }

    /// The board, where it is this layer's turn.
    pub(crate) fn of_layer(
        &mut self,
        layer: usize,
        shape: [usize; 4],
        device: &Device,
    ) -> Result<&mut Tensor<4, Int>> {
        self.check_layer_order(layer)?;
        self.published = layer + 1;
        let count = shape.iter().product::<usize>();
        // Allocated flat, since rows must follow each other.
        let empty = || Tensor::<1, Int>::empty([count], (device, DType::I32)).reshape(shape);
        let lists = self.lists.get_or_insert_with(empty);
        expect_shape("board", &lists.dims(), &shape)?;
        Ok(lists)
    }
}
