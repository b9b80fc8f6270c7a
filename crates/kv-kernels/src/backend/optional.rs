//! Tensors that a call may lack, as backends take them.
//!
//! Backend extensions map tensors between backends in fields of structs and enums that derive
//! `ExtensionType`, but know no `Option`. These enums are it.

use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Backend, Dispatch, ExtensionType};
use burn::tensor::{Int, Tensor};

macro_rules! optional {
    ($(#[$attribute:meta])* $name:ident, $primitive:ident, $tensor:ty) => {
        $(#[$attribute])*
        #[derive(Clone, ExtensionType)]
        pub(crate) enum $name<B: Backend> {
            Absent,
            Present($primitive<B>),
        }

        impl<B: Backend> $name<B> {
            pub(crate) fn as_ref(&self) -> Option<&$primitive<B>> {
                match self {
                    Self::Absent => None,
                    Self::Present(tensor) => Some(tensor),
                }
            }

            pub(crate) fn into_option(self) -> Option<$primitive<B>> {
                match self {
                    Self::Absent => None,
                    Self::Present(tensor) => Some(tensor),
                }
            }

            /// Changes the tensor, if there is one.
            pub(crate) fn map(self, change: impl FnOnce($primitive<B>) -> $primitive<B>) -> Self {
                match self {
                    Self::Absent => Self::Absent,
                    Self::Present(tensor) => Self::Present(change(tensor)),
                }
            }
        }

        impl<const D: usize> From<Option<$tensor>> for $name<Dispatch> {
            fn from(tensor: Option<$tensor>) -> Self {
                tensor.map_or(Self::Absent, |tensor| Self::Present(tensor.into_dispatch()))
            }
        }

        #[cfg(feature = "gpu")]
        impl $name<burn_cubecl::CubeBackend> {
            /// The tensor without gaps between rows, or else `stand_in`.
            ///
            /// A kernel's signature names a buffer for every tensor that any of its variants reads,
            /// and each must be bound. The variant for an absent tensor does not read it. Any
            /// buffer serves that is as long as a vector and that the kernel does not write, since
            /// devices refuse to bind a written buffer twice. Where there is none, see
            /// [`Self::or_new`].
            pub(crate) fn or_stand_in(
                self,
                stand_in: &burn_cubecl::tensor::CubeTensor,
            ) -> burn_cubecl::tensor::CubeTensor {
                match self {
                    Self::Absent => stand_in.clone(),
                    Self::Present(tensor) => burn_cubecl::kernel::into_contiguous(tensor),
                }
            }

            /// As [`Self::or_stand_in`], with a buffer of its own on the device of `like`.
            pub(crate) fn or_new(
                self,
                like: &burn_cubecl::tensor::CubeTensor,
            ) -> burn_cubecl::tensor::CubeTensor {
                match self {
                    Self::Absent => crate::backend::client::unread_like(like),
                    Self::Present(tensor) => burn_cubecl::kernel::into_contiguous(tensor),
                }
            }
        }
    };
}

optional!(
    /// A tensor of floats, or none.
    OptionalFloat, FloatTensor, Tensor<D>
);
impl<B: Backend> OptionalFloat<B> {
    pub(crate) fn of(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::Absent, Self::Present)
    }
}

optional!(
    /// A tensor of integers, or none.
    OptionalInt, IntTensor, Tensor<D, Int>
);
