//! Writes tables as CSV (RFC 4180).
//!
//! A text is quoted, so that it stays in its cell whatever it contains. Spreadsheets take a text that begins with `=`,
//! `+`, `-` or `@` for a formula. Clients of the service choose many of the texts, so such a text gets an apostrophe
//! before it. Begin at [`CsvTable`].

use std::fmt::{Display, Write as _};

use axum::http::header;
use axum::response::{IntoResponse, Response};

use crate::coordination::Timestamp;

/// A table, to which rows are added.
#[derive(Debug)]
pub(super) struct CsvTable {
    text: String,
    columns: usize,
}

/// A row to which cells are added. The row ends when it is dropped.
pub(super) struct CsvRow<'t> {
    table: &'t mut CsvTable,
    cells: usize,
}

impl CsvTable {
    /// Returns a table with these columns, whose names are plain words.
    pub fn new(columns: &[&str]) -> Self {
        Self { text: format!("{}\r\n", columns.join(",")), columns: columns.len() }
    }

    /// Begins a row, which gets one cell for each column.
    pub fn row(&mut self) -> CsvRow<'_> {
        CsvRow { table: self, cells: 0 }
    }

    /// Returns the table as text.
    #[cfg(test)]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl IntoResponse for CsvTable {
    fn into_response(self) -> Response {
        ([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], self.text).into_response()
    }
}

impl CsvRow<'_> {
    fn begin_cell(&mut self) -> &mut String {
        if self.cells > 0 {
            self.table.text.push(',');
        }
        self.cells += 1;
        &mut self.table.text
    }

    /// Adds a number, or a word of this program, as it is.
    pub fn value(mut self, value: impl Display) -> Self {
        // Writing to a string cannot fail.
        let _ = write!(self.begin_cell(), "{value}");
        self
    }

    /// Adds a value, or an empty cell.
    pub fn optional(self, value: Option<impl Display>) -> Self {
        match value {
            Some(value) => self.value(value),
            None => self.value(""),
        }
    }

    /// Adds a text, of which an empty one is an empty cell.
    pub fn text(mut self, text: impl AsRef<str>) -> Self {
        let text = text.as_ref();
        let mark = if text.starts_with(['=', '+', '-', '@', '\t', '\r']) { "'" } else { "" };
        let cell = self.begin_cell();
        if !text.is_empty() {
            let _ = write!(cell, "\"{mark}{}\"", text.replace('"', "\"\""));
        }
        self
    }

    /// Adds a time in UTC to the millisecond.
    pub fn time(self, at: Timestamp) -> Self {
        self.value(at.to_text_with_milliseconds())
    }

    /// Adds a time, or an empty cell.
    pub fn optional_time(self, at: Option<Timestamp>) -> Self {
        self.optional(at.map(Timestamp::to_text_with_milliseconds))
    }
}

impl Drop for CsvRow<'_> {
    fn drop(&mut self) {
        debug_assert_eq!(self.cells, self.table.columns, "a cell for each column");
        self.table.text.push_str("\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_stays_in_its_cell_and_is_no_formula() {
        let mut table = CsvTable::new(&["a", "b", "c"]);
        table.row().text("train/step").value(-3).optional(None::<u64>);
        table.row().text("a\"b,\r\nc").text("=1+1").text("");
        table.row().text("+1").text("-1").text("@x");
        table.row().time(Timestamp(1_500)).optional_time(None).value(1);
        let rows = [
            "a,b,c",
            "\"train/step\",-3,",
            "\"a\"\"b,\r\nc\",\"'=1+1\",",
            "\"'+1\",\"'-1\",\"'@x\"",
            "1970-01-01T00:00:00.001Z,,1",
            "",
        ];
        assert_eq!(table.text(), rows.join("\r\n"));
    }
}
