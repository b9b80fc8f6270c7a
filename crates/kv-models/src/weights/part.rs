//! Reading a part of a tensor, for a rank that has only this part.

use std::io::{self, BufReader, Read};
use std::ops::Range;

use safetensors::tensor::TensorInfo;

use super::PIECE;

/// Which part of a tensor is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// Some indices of its first dimension.
    Rows(Range<usize>),
    /// Some indices of the last dimension of a matrix.
    Columns(Range<usize>),
}

impl Part {
    /// The part as a tensor of its own.
    pub(super) fn of(&self, whole: &TensorInfo) -> TensorInfo {
        let mut shape = whole.shape.clone();
        match (self, shape.as_mut_slice()) {
            (Self::Rows(rows), [first, ..]) => *first = rows.len(),
            (Self::Columns(columns), [.., last]) => *last = columns.len(),
            _ => {}
        }
        TensorInfo { shape, ..whole.clone() }
    }

    /// The bytes of a file that have the part, as consecutive as they are there.
    pub(super) fn bytes_of(&self, whole: &TensorInfo) -> TensorInfo {
        let Self::Rows(rows) = self else { return whole.clone() };
        let (from, to) = whole.data_offsets;
        let row = (to - from) / whole.shape.first().copied().unwrap_or(1).max(1);
        let data_offsets = (from + rows.start * row, from + rows.end * row);
        TensorInfo { data_offsets, ..whole.clone() }
    }
}

/// Reads some columns of a matrix, row by row.
pub(super) struct ColumnReader {
    rows: BufReader<Box<dyn Read>>,
    /// Bytes of a row, and which of them are read.
    row: u64,
    own: Range<u64>,
    /// The place within the row.
    at: u64,
}

impl ColumnReader {
    /// Columns of the matrix `info`, whose bytes `rows` has.
    pub(super) fn new(rows: Box<dyn Read>, info: &TensorInfo, columns: &Range<usize>) -> Self {
        let (from, to) = info.data_offsets;
        let width = info.shape.last().copied().unwrap_or(1).max(1);
        let number = (to - from) / info.shape.iter().product::<usize>().max(1);
        let bytes = |count: usize| (count * number) as u64;
        let own = bytes(columns.start)..bytes(columns.end);
        Self { rows: BufReader::with_capacity(PIECE, rows), row: bytes(width), own, at: 0 }
    }

    fn skip_to(&mut self, at: u64) -> io::Result<()> {
        io::copy(&mut self.rows.by_ref().take(at - self.at), &mut io::sink())?;
        self.at = at;
        Ok(())
    }
}

impl Read for ColumnReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.own.end {
            self.skip_to(self.row)?;
            self.at = 0;
        }
        if self.at < self.own.start {
            self.skip_to(self.own.start)?;
        }
        let left = (self.own.end - self.at).min(buffer.len() as u64);
        let count = self.rows.read(&mut buffer[..left as usize])?;
        self.at += count as u64;
        Ok(count)
    }
}
