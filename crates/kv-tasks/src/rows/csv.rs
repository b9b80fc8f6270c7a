//! Rows of CSV files, whose first line names the columns.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use csv::{Reader, StringRecord};
use serde_json::Value;

use super::{Row, Rows};
use crate::{Place, TaskError};

/// The rows; all values are texts.
pub(super) fn rows(path: Arc<Path>, reader: impl Read + 'static) -> Result<Rows, TaskError> {
    let mut reader = Reader::from_reader(reader);
    let names = match reader.headers() {
        Ok(names) => names.clone(),
        Err(error) => return Err(fault(Place { path, row: Some(("line", 1)) }, error)),
    };
    let rows = reader.into_records().enumerate();
    Ok(Box::new(rows.map(move |(index, record)| {
        let place = Place { path: path.clone(), row: Some(("row", index + 1)) };
        match record {
            Ok(record) => Ok(Row { columns: columns(&names, &record), place }),
            Err(error) => Err(fault(place, error)),
        }
    })))
}

fn columns(names: &StringRecord, record: &StringRecord) -> serde_json::Map<String, Value> {
    let name = |name: &str| name.trim_start_matches('\u{feff}').to_owned();
    names.iter().zip(record).map(|(key, value)| (name(key), value.into())).collect()
}

fn fault(place: Place, error: csv::Error) -> TaskError {
    TaskError::Malformed { place, format: "CSV", reason: error.to_string() }
}
