//! Shares of a sequence as fixed-point numbers, which the host and all devices round alike.

/// A share of a sequence, below 1, as a multiple of 2⁻³².
///
/// Windows and frozen prefixes end at `floor(share * tokens)`. As a fixed-point number the product
/// is exact, so that the host and all devices agree on every end, whatever the rounding of their
/// floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Share(u32);

impl Share {
    /// The share, rounded up. A negative number or NaN gives 0; 1 or more gives the largest share
    /// below 1.
    ///
    /// Because it is rounded up, a share such as 0.7 has 7 of 10 tokens, as in exact arithmetic.
    /// Rounded down, it would have 6.
    pub fn new(share: f64) -> Self {
        // The conversion saturates, and turns NaN into 0.
        Self((share * 2f64.powi(32)).ceil() as u32)
    }

    /// `1 - base^(exponent (l - from) / (N - from))` for layer `l` of `N`, and 0 for `l <= from`.
    /// Eq. (15) and (16) of PrHS.
    ///
    /// The paper counts layers from 1: `layer`, an index from 0, is the paper's layer `l = layer +
    /// 1`. The top layer, `l = N`, has the share `1 - base^exponent` (appendix C).
    pub fn of_depth([base, exponent]: [f64; 2], layer: usize, from: usize, layers: usize) -> Self {
        if layer < from || layer >= layers {
            return Self::default();
        }
        let depth = (layer + 1 - from) as f64 / (layers - from) as f64;
        Self::new(1.0 - base.powf(exponent * depth))
    }

    /// `floor(share * tokens)`
    pub fn of(self, tokens: usize) -> usize {
        ((u128::from(self.0) * tokens as u128) >> 32) as usize
    }

    /// The fewest tokens of which this share is at least `count`; `None` where no length suffices.
    pub fn reaches(self, count: usize) -> Option<usize> {
        if count == 0 {
            return Some(0);
        }
        let share = std::num::NonZeroU32::new(self.0)?;
        usize::try_from(((count as u128) << 32).div_ceil(u128::from(share.get()))).ok()
    }

    /// Whether the share is 0, and so 0 tokens of any sequence.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The share in units of 2⁻³².
    pub fn bits(self) -> u32 {
        self.0
    }

    /// The index of the first token that query `index` sees, both counted from 0: with tokens
    /// counted from 1, query `t` sees the tokens from `floor(share * t)` on.
    pub fn first_seen(self, index: usize) -> usize {
        self.of(index + 1).saturating_sub(1)
    }
}
