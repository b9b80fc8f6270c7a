//! Messages between rank 0 and another rank: a byte of kind, a length, and as many bytes.

use std::io::{self, Read, Write};

/// The largest message: a sum of 256 Mi numbers.
const LARGEST: u32 = 1 << 30;

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// A process introduces itself, as JSON.
    Hello(Vec<u8>),
    /// Rank 0 tells the others what to do, in a form of their own.
    Command(Vec<u8>),
    /// A rank's part of a sum, or the sum, as little-endian f32.
    Numbers(Vec<u8>),
    /// A rank has done its work and ends.
    Done,
}

impl Frame {
    /// Writes the message.
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let (kind, bytes): (u8, &[u8]) = match self {
            Self::Hello(bytes) => (0, bytes),
            Self::Command(bytes) => (1, bytes),
            Self::Numbers(bytes) => (2, bytes),
            Self::Done => (3, &[]),
        };
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length <= LARGEST);
        let length =
            length.ok_or_else(|| invalid(format!("a message of {} bytes", bytes.len())))?;
        let mut whole = Vec::with_capacity(5 + bytes.len());
        whole.push(kind);
        whole.extend(length.to_le_bytes());
        whole.extend(bytes);
        to.write_all(&whole)
    }

    /// Reads a message.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut head = [0; 5];
        from.read_exact(&mut head)?;
        let [kind, length @ ..] = head;
        let length = u32::from_le_bytes(length);
        if length > LARGEST {
            return Err(invalid(format!(
                "a message of {length} bytes, at most {LARGEST} expected"
            )));
        }
        // Not allocated before the bytes are there.
        let mut bytes = Vec::new();
        from.take(u64::from(length)).read_to_end(&mut bytes)?;
        if bytes.len() < length as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match kind {
            0 => Ok(Self::Hello(bytes)),
            1 => Ok(Self::Command(bytes)),
            2 => Ok(Self::Numbers(bytes)),
            3 => Ok(Self::Done),
            _ => Err(invalid(format!("a message of kind {kind}"))),
        }
    }

    /// A message of numbers.
    pub(super) fn numbers(numbers: &[f32]) -> Self {
        Self::Numbers(numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    }
}

/// The numbers of [`Frame::Numbers`].
pub(super) fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_come_back(kind in 0..4_u8, bytes in prop::collection::vec(any::<u8>(), 0..99)) {
            let frame = match kind {
                0 => Frame::Hello(bytes),
                1 => Frame::Command(bytes),
                2 => Frame::Numbers(bytes),
                _ => Frame::Done,
            };
            let mut written = Vec::new();
            frame.write(&mut written).unwrap();
            prop_assert_eq!(Frame::read(&mut written.as_slice()).unwrap(), frame);
            written.pop();
            prop_assert!(Frame::read(&mut written.as_slice()).is_err());
        }

        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = Frame::read(&mut bytes.as_slice());
        }
    }

    #[test]
    fn numbers_come_back() {
        let Frame::Numbers(bytes) = Frame::numbers(&[1.5, -0.0]) else { unreachable!() };
        assert_eq!(numbers(&bytes), [1.5, -0.0]);
    }
}
