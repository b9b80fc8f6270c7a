//! Rows of Parquet files.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::RowIter;
use serde_json::Value;

use super::{Row, Rows};
use crate::{Place, TaskError};

/// The rows, read one row group at a time.
pub(super) fn rows(path: Arc<Path>, file: File) -> Result<Rows, TaskError> {
    let bytes = file.metadata().map_err(|error| TaskError::io(&*path, error))?.len();
    let malformed = |row, reason| TaskError::Malformed {
        place: Place { path: path.clone(), row },
        format: "Parquet",
        reason,
    };
    let open = || {
        let reader = SerializedFileReader::new(file)?;
        check(reader.metadata(), bytes)?;
        Ok(RowIter::from_file_into(Box::new(reader)))
    };
    let mut rows = guarded(open).map_err(|reason| malformed(None, reason))?;
    let (mut number, mut ended) = (0, false);
    let path = path.clone();
    Ok(Box::new(std::iter::from_fn(move || {
        if ended {
            return None;
        }
        number += 1;
        let place = Place { path: path.clone(), row: Some(("row", number)) };
        let row = guarded(|| match rows.next() {
            Some(row) => row.map(|row| Some(row.to_json_value())),
            None => Ok(None),
        });
        match row {
            Ok(Some(Value::Object(columns))) => Some(Ok(Row { place, columns })),
            Ok(_) => None,
            Err(reason) => {
                ended = true;
                Some(Err(TaskError::Malformed { place, format: "Parquet", reason }))
            }
        }
    })))
}

/// The reader panics on some malformed files, which is an error of the file here.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err("its contents contradict its schema".into()),
    }
}

/// What the file claims about itself must fit in it, before anything is read or allocated by it.
fn check(metadata: &ParquetMetaData, bytes: u64) -> Result<(), ParquetError> {
    let claims = |claim: String| Err(ParquetError::General(claim));
    for (index, group) in metadata.row_groups().iter().enumerate() {
        if group.num_rows() < 0 {
            return claims(format!("row group {index} claims {} rows", group.num_rows()));
        }
        for column in group.columns() {
            let start = column.dictionary_page_offset().unwrap_or(column.data_page_offset());
            let end = start.checked_add(column.compressed_size());
            let fits = start >= 4
                && column.compressed_size() >= 0
                && end.is_some_and(|end| u64::try_from(end).is_ok_and(|end| end <= bytes));
            if !fits {
                return claims(format!(
                    "column {} of row group {index} claims {} bytes from {start}, but the file has \
                     {bytes}",
                    column.column_path(),
                    column.compressed_size()
                ));
            }
        }
    }
    Ok(())
}
