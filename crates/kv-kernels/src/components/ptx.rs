//! NVIDIA instructions that CubeCL does not offer, as PTX.

// The compiler does not see that PTX writes variables.
#![allow(unused_assignments)]

use cubecl::prelude::*;

/// `2^x`, as fast as the device can.
#[cube]
pub(crate) fn exp2(x: f32) -> f32 {
    let mut y = 0.0f32;
    gpu_asm!("ex2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// `log2 x`, as fast as the device can.
#[cube]
pub(crate) fn log2(x: f32) -> f32 {
    // An operation turns a variable into a value, which `gpu_asm!` needs.
    let x = x + 0.0f32;
    let mut y = 0.0f32;
    gpu_asm!("lg2.approx.ftz.f32 {}, {};", out(_) y, in(_) x, options(pure, nomem));
    y
}

/// The lower 16 bits of two words side by side, or their upper 16 bits.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn halves_of(a: u32, b: u32, #[comptime] upper: bool) -> u32 {
    let (a, b) = (a | 0u32, b | 0u32);
    let bytes = comptime!(if upper { "0x7632" } else { "0x5410" });
    let mut both = 0u32;
    gpu_asm!(
        "prmt.b32 {}, {}, {}, {bytes};",
        out(_) both, in(_) a, in(_) b, options(pure, nomem)
    );
    both
}

/// The least number of a whole plane. Needs compute capability 8.0.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn least_of_plane(x: u32) -> u32 {
    let x = x | 0u32;
    let mut y = 0u32;
    gpu_asm!("redux.sync.min.u32 {}, {}, 0xffffffff;", out(_) y, in(_) x);
    y
}

/// Reads a vector of two or four words that are hardly read again soon: the line is marked to leave
/// the L2 cache first.
#[cube]
pub(crate) fn read_fleeting<N: Size>(
    from: &[Vector<u32, N>],
    at: usize,
    #[comptime] words: usize,
) -> Vector<u32, N> {
    let mut v = Vector::<u32, N>::empty();
    let address = from[at..at + 1].as_ptr();
    let count = comptime!(if words == 4 { "v4" } else { "v2" });
    gpu_asm!(
        "{{\n .reg .b64 first;\n createpolicy.fractional.L2::evict_first.b64 first, 1.0;\n",
        "ld.global.nc.L1::no_allocate.L2::cache_hint.{count}.u32 {v}, [{address}], first;\n }}",
        v = out(_) v, address = mem_in(_) address, options(explicit_mem)
    );
    v
}

/// The address of shared memory, as its own instructions count bytes.
#[cube]
pub(crate) fn shared_address<T: CubePrimitive>(base: *const T) -> u32 {
    let mut at = 0u32;
    gpu_asm!(
        "{{\n .reg .b64 base;\n cvta.to.shared.u64 base, {};\n cvt.u32.u64 {}, base;\n }}",
        in(_) base, out(_) at, options(pure, nomem)
    );
    at
}

/// Reads a vector of two or four words of shared memory, `offset` bytes from `at`. The instruction
/// is declared to write memory, so that the compiler keeps it after the barrier that follows the
/// writes.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn read_shared<N: Size>(
    at: u32,
    #[comptime] offset: usize,
    #[comptime] words: usize,
) -> Vector<u32, N> {
    let at = at | 0u32;
    let mut v = Vector::<u32, N>::empty();
    let count = comptime!(if words == 4 { "v4" } else { "v2" });
    gpu_asm!("ld.shared.{count}.u32 {v}, [{at}+{offset}];", v = out(_) v, at = in(_) at);
    v
}

/// The type of a pair of 16-bit floats in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Halves {
    F16,
    Bf16,
}

impl Halves {
    /// PTX's name of the type.
    fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16x2",
            Self::Bf16 => "bf16x2",
        }
    }

    /// The bits of a pair of ones.
    pub(crate) fn ones(self) -> u32 {
        match self {
            Self::F16 => 0x3c00_3c00,
            Self::Bf16 => 0x3f80_3f80,
        }
    }
}

/// The smaller halves of two words, each half compared by itself.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn smaller_halves(a: u32, b: u32, #[comptime] halves: Halves) -> u32 {
    let (a, b) = (a | 0u32, b | 0u32);
    let mut least = 0u32;
    let name = comptime!(halves.name());
    gpu_asm!("min.{name} {}, {}, {};", out(_) least, in(_) a, in(_) b, options(pure, nomem));
    least
}

/// The larger halves of two words, each half compared by itself.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn larger_halves(a: u32, b: u32, #[comptime] halves: Halves) -> u32 {
    let (a, b) = (a | 0u32, b | 0u32);
    let mut most = 0u32;
    let name = comptime!(halves.name());
    gpu_asm!("max.{name} {}, {}, {};", out(_) most, in(_) a, in(_) b, options(pure, nomem));
    most
}

/// The product of two pairs of halves, one of which holds only 1 and −1, so that nothing is
/// rounded.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn scaled_halves(a: u32, b: u32, #[comptime] halves: Halves) -> u32 {
    let (a, b) = (a | 0u32, b | 0u32);
    let mut product = 0u32;
    let name = comptime!(halves.name());
    // A sum with −0: a product alone needs newer devices.
    gpu_asm!(
        "{{\n .reg .b32 none;\n mov.b32 none, 0x80008000;\n fma.rn.{name} {}, {}, {}, none;\n }}",
        out(_) product, in(_) a, in(_) b, options(pure, nomem)
    );
    product
}

/// Adds 1 to a counter in global memory, and returns its old value. Cubes that arrive later see all
/// that this cube wrote before its last barrier. After its next barrier, this cube sees all that
/// earlier cubes wrote.
#[cube]
pub(crate) fn arrive_at(counters: &[u32], at: usize) -> u32 {
    let address = counters[at..at + 1].as_ptr();
    let mut before = 0u32;
    gpu_asm!("atom.acq_rel.gpu.global.add.u32 {}, [{}], 1;", out(_) before, in(_) address);
    before
}

/// Reads four numbers from `at` on, a multiple of four. Other cubes may have written them.
#[cube]
pub(crate) fn read_four(from: &[f32], at: usize) -> Vector<f32, Const<4>> {
    let address = from[at..at + 1].as_ptr();
    let mut v = Vector::<u32, Const<4>>::empty();
    gpu_asm!("ld.global.v4.u32 {v}, [{address}];", v = out(_) v, address = in(_) address);
    Vector::reinterpret(v)
}

/// Discards the 128 bytes from `at` on, a line of the L2 cache: nothing reads them again, so the
/// device need not write them to memory. Needs compute capability 8.0.
#[cube]
pub(crate) fn discard(numbers: &[f32], at: usize) {
    let address = numbers[at..at + 1].as_ptr();
    gpu_asm!("discard.global.L2 [{}], 128;", in(_) address);
}

/// Raises the 64-bit number in the words `at` (low) and `at + 1` (high) to at least the given one.
/// `at` is even.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn raise(numbers: &[u32], at: usize, high: u32, low: u32) {
    let address = numbers[at..at + 1].as_ptr();
    let (high, low) = (high | 0u32, low | 0u32);
    gpu_asm!(
        "{{\n .reg .b64 both, before;\n mov.b64 both, {{{}, {}}};\n",
        "atom.relaxed.gpu.global.max.u64 before, [{}], both;\n }}",
        in(_) low, in(_) high, in(_) address
    );
}

/// Takes the 64-bit number of [`raise`] out of memory and leaves 0. Returns the upper and the lower
/// word.
#[cube]
pub(crate) fn take_raised(numbers: &[u32], at: usize) -> (u32, u32) {
    let address = numbers[at..at + 1].as_ptr();
    // The compiler knows instructions of one result only, so both words are one vector.
    let mut both = Vector::<u32, Const<2>>::empty();
    gpu_asm!(
        "{{\n .reg .b64 taken;\n mov.b64 taken, 0;\n",
        "atom.relaxed.gpu.global.exch.b64 taken, [{address}], taken;\n mov.b64 {both}, taken;\n }}",
        both = out(_) both, address = in(_) address
    );
    (both.extract(1usize), both.extract(0usize))
}

/// Reads a word of memory outside of the device's, at `4 at` bytes from an address in two halves.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn read_far(low: u32, high: u32, at: u32) -> u32 {
    let (low, high, at) = (low | 0u32, high | 0u32, at | 0u32);
    let mut word = 0u32;
    gpu_asm!(
        "{{\n .reg .b64 from;\n mov.b64 from, {{{low}, {high}}};\n",
        "mad.wide.u32 from, {at}, 4, from;\n ld.global.u32 {word}, [from];\n }}",
        word = out(_) word, low = in(_) low, high = in(_) high, at = in(_) at
    );
    word
}

/// Writes a word of memory outside of the device's, at `4 at` bytes from an address in two halves.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn write_far(low: u32, high: u32, at: u32, word: u32) {
    let (low, high, at, word) = (low | 0u32, high | 0u32, at | 0u32, word | 0u32);
    gpu_asm!(
        "{{\n .reg .b64 to;\n mov.b64 to, {{{low}, {high}}};\n",
        "mad.wide.u32 to, {at}, 4, to;\n st.global.u32 [to], {word};\n }}",
        low = in(_) low, high = in(_) high, at = in(_) at, word = in(_) word
    );
}

/// Writes a slot of an inbox, `8 at` bytes behind an address in two halves. A slot is a word and its
/// turn, which arrive together.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn write_slot(low: u32, high: u32, at: u32, word: u32, turn: u32) {
    let (low, high, at) = (low | 0u32, high | 0u32, at | 0u32);
    let (word, turn) = (word | 0u32, turn | 0u32);
    gpu_asm!(
        "{{\n .reg .b64 to, both;\n mov.b64 to, {{{low}, {high}}};\n",
        "mad.wide.u32 to, {at}, 8, to;\n mov.b64 both, {{{word}, {turn}}};\n",
        "st.relaxed.sys.global.u64 [to], both;\n }}",
        low = in(_) low, high = in(_) high, at = in(_) at, word = in(_) word, turn = in(_) turn
    );
}

/// Waits until a slot is of this turn, and returns its word.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn read_slot(low: u32, high: u32, at: u32, turn: u32) -> u32 {
    let (low, high, at, turn) = (low | 0u32, high | 0u32, at | 0u32, turn | 0u32);
    let mut word = 0u32;
    gpu_asm!(
        "{{\n .reg .b64 from, both;\n .reg .b32 of_word;\n .reg .pred early;\n",
        "mov.b64 from, {{{low}, {high}}};\n mad.wide.u32 from, {at}, 8, from;\n",
        "WAIT:\n ld.relaxed.sys.global.u64 both, [from];\n mov.b64 {{{word}, of_word}}, both;\n",
        "setp.ne.u32 early, of_word, {turn};\n @early bra WAIT;\n }}",
        word = out(_) word, low = in(_) low, high = in(_) high, at = in(_) at, turn = in(_) turn
    );
    word
}

/// Writes a line of an inbox, `16 at` bytes from an address in two halves: two words, and the turn
/// beside each. A word and its turn arrive together.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn write_line(low: u32, high: u32, at: u32, first: u32, second: u32, turn: u32) {
    let (low, high, at, turn) = (low | 0u32, high | 0u32, at | 0u32, turn | 0u32);
    let (first, second) = (first | 0u32, second | 0u32);
    gpu_asm!(
        "{{\n .reg .b64 to;\n mov.b64 to, {{{low}, {high}}};\n",
        "mad.wide.u32 to, {at}, 16, to;\n",
        "st.volatile.global.v4.u32 [to], {{{first}, {turn}, {second}, {turn}}};\n }}",
        low = in(_) low, high = in(_) high, at = in(_) at, first = in(_) first,
        second = in(_) second, turn = in(_) turn
    );
}

/// Waits until both words of a line are of this turn, and returns them.
#[cube]
#[allow(clippy::identity_op, reason = "an operation makes a value of what may be a variable")]
pub(crate) fn read_line(low: u32, high: u32, at: u32, turn: u32) -> Vector<u32, Const<2>> {
    let (low, high, at, turn) = (low | 0u32, high | 0u32, at | 0u32, turn | 0u32);
    let mut both = Vector::<u32, Const<2>>::empty();
    gpu_asm!(
        "{{\n .reg .b64 from, words;\n .reg .b32 first, second, of_first, of_second;\n",
        ".reg .pred early;\n mov.b64 from, {{{low}, {high}}};\n",
        "mad.wide.u32 from, {at}, 16, from;\n",
        "WAIT:\n ld.volatile.global.v4.u32 {{first, of_first, second, of_second}}, [from];\n",
        "setp.ne.u32 early, of_first, {turn};\n setp.ne.or.u32 early, of_second, {turn}, early;\n",
        "@early bra WAIT;\n mov.b64 words, {{first, second}};\n mov.b64 {both}, words;\n }}",
        both = out(_) both, low = in(_) low, high = in(_) high, at = in(_) at, turn = in(_) turn
    );
    both
}
