//! [`Cells`]: the cells of a row, in one piece of memory.

use crate::texts::{Text, Texts};

/// The longest cell that is kept in its row, in bytes. Longer ones are texts of [`Texts`], such as names of
/// nodes and images, which many rows have. A text for the address of each pod would take more than that.
const OWN: usize = 20;
/// In the place of a length: the number of a text follows.
const SHARED: u8 = u8::MAX;

/// For each cell its length and its bytes, or [`SHARED`] and the number of a text.
#[derive(Debug)]
pub(crate) struct Cells(Box<[u8]>);

enum Cell<'a> {
    Own(&'a str),
    Shared(Text),
}

impl Cells {
    pub(crate) fn new(cells: &[String], texts: &mut Texts) -> Self {
        let mut bytes = Vec::new();
        for cell in cells {
            match u8::try_from(cell.len()) {
                Ok(len) if cell.len() <= OWN => {
                    bytes.push(len);
                    bytes.extend_from_slice(cell.as_bytes());
                }
                _ => {
                    bytes.push(SHARED);
                    bytes.extend_from_slice(&texts.add(cell).to_bytes());
                }
            }
        }
        Self(bytes.into_boxed_slice())
    }

    /// Returns all of them.
    pub(crate) fn iter<'a>(&'a self, texts: &'a Texts) -> impl Iterator<Item = &'a str> {
        self.cells().map(|cell| match cell {
            Cell::Own(text) => text,
            Cell::Shared(text) => texts.get(text),
        })
    }

    /// Takes one user from each text. The cells must not be used any more.
    pub(crate) fn release(&self, texts: &mut Texts) {
        for cell in self.cells() {
            if let Cell::Shared(text) = cell {
                texts.remove(text);
            }
        }
    }

    /// Returns how many bytes they take, without texts that are shared.
    pub(crate) fn bytes(&self) -> usize {
        self.0.len()
    }

    fn cells(&self) -> impl Iterator<Item = Cell<'_>> {
        let mut rest = &*self.0;
        std::iter::from_fn(move || {
            let (first, after) = rest.split_first()?;
            if *first == SHARED {
                let (number, after) = after.split_first_chunk()?;
                rest = after;
                return Some(Cell::Shared(Text::from_bytes(*number)));
            }
            let (text, after) = after.split_at_checked(usize::from(*first))?;
            rest = after;
            // It was a text when it was written.
            Some(Cell::Own(std::str::from_utf8(text).unwrap_or_default()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_those_that_were_put_in() {
        let mut texts = Texts::default();
        let long = "ip-10-0-12-34.eu-west-1.compute.internal".to_owned();
        let all = ["1/1".to_owned(), String::new(), "ü".repeat(10), "ü".repeat(11), long.clone(), long];
        let cells = Cells::new(&all, &mut texts);
        assert_eq!(cells.iter(&texts).collect::<Vec<_>>(), all);
        assert_eq!(texts.len(), 2, "short ones are no texts");
        cells.release(&mut texts);
        assert_eq!(texts.len(), 0);
        assert_eq!(Cells::new(&[], &mut texts).iter(&texts).count(), 0);
    }
}
