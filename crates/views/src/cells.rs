//! The cells of a row, as bytes.

use crate::{
    number,
    texts::{Text, Texts},
};

/// The longest cell that is kept in its row, in bytes. Longer ones are texts of [`Texts`], such as names of
/// nodes and images, which many rows have. A text for the address of each pod would take more than that.
const OWN: u8 = 20;
/// In the place of a length: the number of a text follows.
const SHARED: u8 = u8::MAX;
/// In the place of a length: the first of [`WORDS`].
const WORD: u8 = OWN + 1;

/// What API servers print often. Such a cell takes one byte. Sorted.
const WORDS: [&str; 92] = [
    "0",
    "0/1",
    "0/2",
    "0/3",
    "1",
    "1/1",
    "1/2",
    "1/3",
    "2",
    "2/2",
    "2/3",
    "3",
    "3/3",
    "4",
    "4/4",
    "5",
    "5/5",
    "6",
    "7",
    "8",
    "9",
    "<invalid>",
    "<none>",
    "<unknown>",
    "Active",
    "Available",
    "BackOff",
    "Bound",
    "ClusterIP",
    "Complete",
    "Completed",
    "ContainerCreating",
    "CrashLoopBackOff",
    "Created",
    "Delete",
    "ErrImagePull",
    "Error",
    "Evicted",
    "ExternalName",
    "Failed",
    "FailedMount",
    "FailedScheduling",
    "False",
    "Filesystem",
    "Healthy",
    "ImagePullBackOff",
    "Init:0/1",
    "Init:0/2",
    "Init:1/2",
    "Init:Error",
    "Killing",
    "LoadBalancer",
    "NodePort",
    "None",
    "Normal",
    "NotReady",
    "OOMKilled",
    "Opaque",
    "Pending",
    "PodInitializing",
    "Progressing",
    "Pulled",
    "Pulling",
    "RWO",
    "RWX",
    "Ready",
    "Released",
    "Retain",
    "Running",
    "ScalingReplicaSet",
    "Scheduled",
    "Started",
    "Succeeded",
    "SuccessfulCreate",
    "SuccessfulDelete",
    "Suspended",
    "Synced",
    "Terminating",
    "True",
    "Unhealthy",
    "Unknown",
    "Unschedulable",
    "Valid",
    "WaitForFirstConsumer",
    "Warning",
    "amd64",
    "arm64",
    "control-plane",
    "false",
    "linux",
    "true",
    "worker",
];

/// The cells of a row: for each its length and its bytes, or a word, or [`SHARED`] and the number of a text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cells<'a>(&'a [u8]);

enum Cell<'a> {
    Own(&'a str),
    Shared(Text),
}

/// Appends cells.
pub(crate) fn put(cells: &[String], texts: &mut Texts, bytes: &mut Vec<u8>) {
    for cell in cells {
        match (WORDS.binary_search(&cell.as_str()), u8::try_from(cell.len())) {
            // There are fewer than 200.
            (Ok(word), _) => bytes.push(WORD + word as u8),
            (Err(_), Ok(len)) if len <= OWN => {
                bytes.push(len);
                bytes.extend_from_slice(cell.as_bytes());
            }
            _ => {
                bytes.push(SHARED);
                number::put(texts.add(cell).to_number(), bytes);
            }
        }
    }
}

impl<'a> Cells<'a> {
    /// Reads cells that [`put`] has appended.
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Returns all of them.
    pub(crate) fn iter(self, texts: &'a Texts) -> impl Iterator<Item = &'a str> {
        self.cells().map(|cell| match cell {
            Cell::Own(text) => text,
            Cell::Shared(text) => texts.get(text),
        })
    }

    /// Takes one user from each text. The cells must not be used any more.
    pub(crate) fn release(self, texts: &mut Texts) {
        for cell in self.cells() {
            if let Cell::Shared(text) = cell {
                texts.remove(text);
            }
        }
    }

    fn cells(self) -> impl Iterator<Item = Cell<'a>> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let (first, after) = rest.split_first()?;
            rest = after;
            match *first {
                SHARED => Some(Cell::Shared(Text::from_number(number::take(&mut rest)))),
                len @ ..=OWN => {
                    let (text, after) = rest.split_at_checked(usize::from(len))?;
                    rest = after;
                    // It was a text when it was written.
                    Some(Cell::Own(std::str::from_utf8(text).unwrap_or_default()))
                }
                word => Some(Cell::Own(WORDS.get(usize::from(word - WORD)).copied().unwrap_or_default())),
            }
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
        let mut all =
            vec![String::new(), "ü".repeat(10), "ü".repeat(11), long.clone(), "<non>".to_owned(), long];
        all.extend(WORDS.map(str::to_owned));
        let mut bytes = Vec::new();
        put(&all, &mut texts, &mut bytes);
        let cells = Cells::new(&bytes);
        assert_eq!(cells.iter(&texts).collect::<Vec<_>>(), all);
        assert_eq!(texts.len(), 2, "short ones are no texts");
        cells.release(&mut texts);
        assert_eq!(texts.len(), 0);
        assert_eq!(Cells::new(&[]).iter(&texts).count(), 0);
    }

    #[test]
    fn a_word_takes_one_byte() {
        assert!(WORDS.is_sorted() && WORDS.len() < usize::from(SHARED - WORD));
        let (mut texts, mut bytes) = (Texts::default(), Vec::new());
        put(&WORDS.map(str::to_owned), &mut texts, &mut bytes);
        assert_eq!((bytes.len(), texts.len()), (WORDS.len(), 0));
    }
}
