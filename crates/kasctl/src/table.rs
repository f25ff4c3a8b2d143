//! Aligned columns that are safe to print on a terminal.
//! A cell may contain text from a cluster, so control characters are escaped: a pod name must not move the
//! cursor. Widths only grow, so later rows stay aligned with earlier ones as long as they fit.

/// The most characters of an [`excerpt`].
const MAX_EXCERPT: usize = 300;

/// A table that is printed row by row.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    widths: [usize; N],
}

impl<const N: usize> Table<N> {
    /// Starts a table whose columns are as wide as their titles.
    pub(crate) fn new(titles: [&str; N]) -> Self {
        Self { widths: titles.map(|title| title.chars().count()) }
    }

    /// Widens the columns for these rows, and returns the rows as lines.
    pub(crate) fn rows<'a>(&mut self, rows: impl IntoIterator<Item = &'a [String; N]>) -> String {
        let rows: Vec<[String; N]> = rows.into_iter().map(|row| row.each_ref().map(|c| visible(c))).collect();
        for row in &rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        rows.iter().map(|row| self.line(row)).collect()
    }

    fn line(&self, row: &[String; N]) -> String {
        let mut line = String::new();
        for (width, cell) in self.widths.iter().zip(row) {
            line.push_str(cell);
            let padding = width.saturating_sub(cell.chars().count()) + 3;
            line.extend(std::iter::repeat_n(' ', padding));
        }
        line.truncate(line.trim_end().len());
        line.push('\n');
        line
    }
}

/// Returns a cell with control characters escaped, or `-` for an empty one, so that columns can be counted.
fn visible(cell: &str) -> String {
    if cell.is_empty() { "-".to_owned() } else { printable(cell) }
}

/// Returns a text as one line: control characters, line separators and direction marks are escaped.
pub(crate) fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        let hostile = c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if hostile { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    shown
}

/// Returns a text of another program for an error: as one line, and not too long.
pub(crate) fn excerpt(text: &str) -> String {
    printable(text).chars().take(MAX_EXCERPT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row<const N: usize>(cells: [&str; N]) -> [String; N] {
        cells.map(str::to_owned)
    }

    #[test]
    fn columns_are_aligned_and_lines_have_no_trailing_space() {
        let mut table = Table::new(["NAMESPACE", "NAME"]);
        let text = table.rows(&[row(["NAMESPACE", "NAME"]), row(["kube-system-long", "a"]), row(["x", ""])]);
        assert_eq!(text, "NAMESPACE          NAME\nkube-system-long   a\nx                  -\n");
    }

    #[test]
    fn later_rows_keep_the_widths_of_earlier_ones() {
        let mut table = Table::new(["A", "B"]);
        assert_eq!(table.rows(&[row(["12345", "x"])]), "12345   x\n");
        assert_eq!(table.rows(&[row(["1", "y"])]), "1       y\n");
    }

    #[test]
    fn width_counts_characters_and_control_characters_are_shown() {
        let mut table = Table::new(["A", "B"]);
        assert_eq!(
            table.rows(&[row(["äöü", "x"]), row(["a", "\u{1b}[2J\n"])]),
            "äöü   x\na     \\u{1b}[2J\\n\n"
        );
    }
}
