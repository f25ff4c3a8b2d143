//! Checks which users may read and write a file that only kas should access.

use std::{fs, path::Path};

/// What is wrong with the mode of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exposure {
    /// Users other than the owner and the group may read or write it.
    Open(String),
    /// Unusual, but no danger in itself.
    Odd(String),
}

/// The expected mode, for a problem.
pub const EXPECTED: &str = "mode 0600, or 0640 for a group (`defaultMode: 0440` in a volume of Kubernetes)";

/// Checks the mode of a file that contains `what`, a noun with its article.
pub fn of(what: &str, path: &Path, mode: u32) -> Option<Exposure> {
    let shown = mode & 0o7777;
    let may = match mode & 0o006 {
        0 if mode & 0o020 != 0 => {
            return Some(Exposure::Odd(format!(
                "its group may write {what} (mode {shown:04o}): use mode 0640"
            )));
        }
        0 => return None,
        0o004 => "read",
        0o002 => "write",
        _ => "read and write",
    };
    let text = format!("{what} that everyone on this host may {may} (mode {shown:04o}, {})", path.display());
    // Kubernetes mounts a volume with mode 0644 by default, and no other pod sees it.
    Some(if is_in_kubernetes_volume(path) {
        Exposure::Odd(format!("{text}: only this pod sees the volume, but `defaultMode: 0440` is better"))
    } else {
        Exposure::Open(text)
    })
}

/// Whether a file is part of a volume that Kubernetes writes. Kubernetes replaces all files of a volume at
/// once by exchanging the link `..data`, so the path of such a file leads through that link.
fn is_in_kubernetes_volume(path: &Path) -> bool {
    let mut folders = path.ancestors().skip(1);
    folders.any(|folder| {
        let data = folder.join("..data");
        fs::symlink_metadata(&data).is_ok_and(|found| found.is_symlink())
            && match (fs::canonicalize(path), fs::canonicalize(&data)) {
                (Ok(file), Ok(data)) => file.starts_with(data),
                _ => false,
            }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_access_by_other_users_is_open() {
        let path = Path::new("/etc/kas/key.pem");
        for mode in [0o600, 0o400, 0o640, 0o440, 0o100_600] {
            assert_eq!(of("a key", path, mode), None, "{mode:o}");
        }
        for (mode, may) in [
            (0o644, "read"),
            (0o604, "read"),
            (0o602, "write"),
            (0o666, "read and write"),
            (0o777, "read and write"),
        ] {
            let text =
                format!("a key that everyone on this host may {may} (mode {mode:04o}, /etc/kas/key.pem)");
            assert_eq!(of("a key", path, mode), Some(Exposure::Open(text)));
        }
        let odd = "its group may write a key (mode 0660): use mode 0640";
        assert_eq!(of("a key", path, 0o660), Some(Exposure::Odd(odd.to_owned())));
    }

    #[test]
    fn a_kubernetes_volume_is_odd_but_not_open() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("..1")).unwrap();
        fs::write(at("..1/key"), "").unwrap();
        symlink("..1", at("..data")).unwrap();
        symlink("..data/key", at("key")).unwrap();
        assert!(matches!(of("a key", &at("key"), 0o644), Some(Exposure::Odd(_))));
        // A file beside the link is not part of the volume.
        fs::write(at("other"), "").unwrap();
        assert!(matches!(of("a key", &at("other"), 0o644), Some(Exposure::Open(_))));
    }
}
