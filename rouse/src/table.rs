//! Pure: rows of text → aligned columns, as kubectl prints them.

/// Number of spaces between two columns.
const COLUMN_GAP: usize = 3;

/// Table of text. Columns are as wide as their widest cell; the last is not padded.
#[derive(Clone, Debug, Default)]
pub(crate) struct TextTable {
    /// Column names; if empty, no line of names is printed.
    pub(crate) header: Vec<String>,
    /// Cells of each row, in the order of the columns.
    pub(crate) rows: Vec<Vec<String>>,
}

impl TextTable {
    /// Formats the table as text, one line per row.
    pub(crate) fn to_text(&self) -> String {
        let head = Some(&self.header).filter(|head| !head.is_empty());
        let lines: Vec<&Vec<String>> = head.into_iter().chain(&self.rows).collect();
        let columns = lines.iter().map(|cells| cells.len()).max().unwrap_or_default();
        let width = |column: usize| {
            lines
                .iter()
                .filter_map(|cells| cells.get(column))
                .map(|cell| cell.chars().count())
                .max()
        };
        let widths: Vec<usize> =
            (0..columns).map(|column| width(column).unwrap_or_default()).collect();
        let line = |cells: &&Vec<String>| {
            let cell = |(column, cell): (usize, &String)| match widths.get(column) {
                // The last column needs no padding, which would only wrap on a narrow terminal.
                Some(width) if column + 1 < columns => format!("{cell:<0$}", width + COLUMN_GAP),
                _ => cell.clone(),
            };
            let line: String = cells.iter().enumerate().map(cell).collect();
            format!("{}\n", line.trim_end())
        };
        lines.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|&cell| cell.to_owned()).collect()
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let table = TextTable {
            header: row(&["NAME", "URL", "READY"]),
            rows: vec![row(&["hello", "http://h", "True"]), row(&["x", "", ""])],
        };
        assert_eq!(table.to_text(), "NAME    URL        READY\nhello   http://h   True\nx\n");
    }

    #[test]
    fn without_names_only_rows_are_printed() {
        let table = TextTable { header: vec![], rows: vec![row(&["a", "b"])] };
        assert_eq!(table.to_text(), "a   b\n");
        assert_eq!(TextTable::default().to_text(), "");
    }
}
