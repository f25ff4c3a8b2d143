//! Warns when a list of revoked certificates is overdue: it is used further, so nobody else would notice.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

/// A file with lists of revoked certificates.
#[derive(Debug)]
struct KnownLists {
    section: &'static str,
    file: PathBuf,
    /// When the first of them should have been replaced, since 1970; `None`: no list says so.
    due: Option<Duration>,
    was_warned: bool,
}

/// The files in use.
#[derive(Debug, Default)]
pub(super) struct Lists(Vec<KnownLists>);

impl Lists {
    /// Records when the lists of a file should be replaced.
    pub(super) fn are_due(&mut self, section: &'static str, file: &Path, due: Option<Duration>) {
        let mut known = self.0.iter_mut();
        match known.find(|known| known.section == section && known.file == file) {
            Some(known) if known.due == due => {}
            Some(known) => (known.due, known.was_warned) = (due, false),
            None => self.0.push(KnownLists { section, file: file.to_owned(), due, was_warned: false }),
        }
    }

    /// Logs which lists are overdue, once for each.
    pub(super) fn warn_at(&mut self, now: Duration) {
        for KnownLists { section, file, due, was_warned } in &mut self.0 {
            if *was_warned || due.is_none_or(|due| now < due) {
                continue;
            }
            *was_warned = true;
            tracing::error!(
                section,
                file = %file.display(),
                "a list of revoked certificates is overdue: what was revoked since is still accepted; put the current \
                 list into the file"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overdue_list_is_warned_about_once() {
        let mut lists = Lists::default();
        let (file, hours) = (Path::new("/crl.pem"), |hours: u64| Duration::from_secs(hours * 3600));
        let warned = |lists: &Lists| lists.0.iter().map(|one| one.was_warned).collect::<Vec<_>>();
        lists.are_due("a", file, Some(hours(24)));
        lists.warn_at(hours(23));
        assert_eq!(warned(&lists), [false]);
        lists.warn_at(hours(24));
        assert_eq!(warned(&lists), [true]);
        // The same list is read again, and then a newer one.
        lists.are_due("a", file, Some(hours(24)));
        assert_eq!(warned(&lists), [true]);
        lists.are_due("a", file, Some(hours(48)));
        lists.warn_at(hours(25));
        assert_eq!(warned(&lists), [false]);
        // Lists without a time are never overdue.
        lists.are_due("a", file, None);
        lists.warn_at(Duration::MAX);
        assert_eq!(warned(&lists), [false]);
    }
}
