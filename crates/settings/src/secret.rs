//! Secret files: reads them as 14.1 does, and creates the one that kas generates.
//!
//! No error, warning or `Debug` shows any part of a secret.

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use base64::{
    Engine as _,
    alphabet::STANDARD,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use secrecy::{ExposeSecret as _, SecretSlice, SecretString, zeroize::Zeroizing};
use subtle::ConstantTimeEq as _;

use crate::{
    Warning,
    exposure::{self, Exposure},
};

/// Standard base64 with padding. Like 14.1, it ignores the unused bits of the last character, so that every
/// file that works there works here.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::RequireCanonical)
        .with_decode_allow_trailing_bits(true),
);

/// The length of a generated secret and the minimum of any, in bytes: HS256 needs a key at least as long as
/// its hash (RFC 7518, section 3.2).
pub const BYTES: usize = 32;

/// Minimum number of different bytes. 32 random bytes contain about 30 different ones, and 32 random
/// hexadecimal digits about 14; fewer than this means that the secret was typed by hand.
const FEWEST_DIFFERENT: usize = 8;

/// Largest size in bytes of a secret file: a wrong path to a large file must not fill the memory.
const LARGEST_FILE: u64 = 64 * 1024;

/// A shared secret that signs or verifies tokens. Its `Debug` shows no part of it.
pub struct ApiSecret {
    bytes: SecretSlice<u8>,
    faults: Vec<Fault>,
    warnings: Vec<Warning>,
}

/// Why a secret that could be read must not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What was found, in the words of a [`crate::Problem`].
    pub found: String,
    /// What is expected.
    pub expected: &'static str,
    /// The only fault is that others may read the file.
    pub is_open: bool,
}

impl ApiSecret {
    /// Reads a base64 file. The secret may be weak: callers that use it check [`faults`](Self::faults).
    ///
    /// # Errors
    /// [`SecretError`] if the file cannot be read or is not base64.
    pub fn read(path: &Path) -> Result<Self, SecretError> {
        let fail = |reason| SecretError { path: path.to_owned(), reason };
        let (text, mode) = read_file(path).map_err(|error| fail(Reason::Io(error)))?;
        if text.len() as u64 > LARGEST_FILE {
            return Err(fail(Reason::TooLarge));
        }
        // Line breaks are allowed anywhere: base64 is often wrapped at 64 or 76 characters.
        let mut encoded = Zeroizing::new(Vec::with_capacity(text.len()));
        encoded.extend(text.iter().copied().filter(|byte| !b"\r\n".contains(byte)));
        if encoded.is_empty() {
            return Err(fail(Reason::Empty));
        }
        let mut bytes = Zeroizing::new(vec![0; base64::decoded_len_estimate(encoded.len())]);
        let length = BASE64.decode_slice(&*encoded, &mut bytes).map_err(|_| fail(Reason::NotBase64))?;
        bytes.truncate(length);
        let secret = Self { bytes: bytes.to_vec().into(), faults: Vec::new(), warnings: Vec::new() };
        Ok(secret.judged(path, mode))
    }

    /// Returns the bytes, for signing or verifying.
    pub fn expose(&self) -> &[u8] {
        self.bytes.expose_secret()
    }

    /// Returns why the secret must not be used.
    pub fn faults(&self) -> &[Fault] {
        &self.faults
    }

    /// Returns the warnings about its file.
    pub fn warnings(&self) -> impl Iterator<Item = &Warning> {
        self.warnings.iter()
    }

    fn judged(mut self, path: &Path, mode: u32) -> Self {
        let bytes = self.bytes.expose_secret();
        let shown = path.display();
        let mut different = [false; 256];
        bytes.iter().for_each(|byte| different[usize::from(*byte)] = true);
        let different = different.into_iter().filter(|seen| *seen).count();
        let weak = if bytes.len() < BYTES {
            Some(format!("a secret of {} bytes ({shown})", bytes.len()))
        } else if different < FEWEST_DIFFERENT {
            Some(format!("a secret that is not random: it has only {different} different bytes ({shown})"))
        } else {
            None
        };
        let expected = "at least 32 random bytes, for example from `openssl rand -base64 32`";
        self.faults.extend(weak.map(|found| Fault { found, expected, is_open: false }));
        match exposure::of("a secret file", path, mode) {
            None => {}
            Some(Exposure::Odd(text)) => {
                self.warnings.push(Warning { path: path.display().to_string(), text });
            }
            Some(Exposure::Open(found)) => {
                self.faults.push(Fault { found, expected: exposure::EXPECTED, is_open: true });
            }
        }
        self
    }
}

/// Takes constant time for secrets of the same length.
impl PartialEq for ApiSecret {
    fn eq(&self, other: &Self) -> bool {
        self.expose().ct_eq(other.expose()).into()
    }
}
impl Eq for ApiSecret {}

impl fmt::Debug for ApiSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiSecret(not shown)")
    }
}

/// Whether a call created the secret file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The file was absent and has been created.
    Yes,
    /// The file existed.
    No,
}

/// Reads a secret file. If it is absent, creates it with 32 random bytes and mode 0600.
///
/// The file appears complete or not at all, and processes that start together agree on one secret: it is
/// written under another name and then linked, which never replaces a file.
///
/// # Errors
/// [`SecretError`] if the file cannot be read or created, or is not base64.
pub fn load_or_create(path: &Path) -> Result<(ApiSecret, Created), SecretError> {
    match ApiSecret::read(path) {
        Err(error) if error.is_absent() => {}
        read => return Ok((read?, Created::No)),
    }
    let mut bytes = Zeroizing::new([0_u8; BYTES]);
    let fail = |error| SecretError { path: path.to_owned(), reason: Reason::Make(error) };
    aws_lc_rs::rand::fill(&mut *bytes)
        .map_err(|_| fail(io::Error::other("cannot get random bytes from the system")))?;
    let mut text = Zeroizing::new(BASE64.encode(*bytes));
    text.push('\n');
    let created = create_private(path, text.as_bytes()).map_err(fail)?;
    Ok((ApiSecret::read(path)?, created))
}

/// Creates a file of mode 0600 and its folder (0700). The file appears complete or not at all, and an
/// existing file is kept.
pub fn create_private(path: &Path, content: &[u8]) -> io::Result<Created> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut draft_name = std::ffi::OsString::from(".");
    draft_name.push(name);
    draft_name.push(format!(".{:016x}", rand::random::<u64>()));
    let draft = folder.join(draft_name);
    let made = write_new(&draft, content).and_then(|()| match fs::hard_link(&draft, path) {
        Ok(()) => Ok(Created::Yes),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Created::No),
        Err(error) => Err(error),
    });
    // The temporary file is no longer needed; a leftover would be a second copy of a secret.
    let removed = fs::remove_file(&draft);
    let made = made?;
    removed?;
    // The name must survive a power failure: a secret that clients already use must not change.
    File::open(folder)?.sync_all()?;
    Ok(made)
}

/// Reads a password. A final line break is not part of it.
///
/// # Errors
/// Returns what was found instead, without any of the content.
pub fn read_password(path: &Path) -> Result<SecretString, String> {
    let shown = path.display();
    let (text, _) =
        read_file(path).map_err(|error| format!("a file that cannot be read ({shown}: {error})"))?;
    if text.len() as u64 > LARGEST_FILE {
        return Err(format!("a file larger than {LARGEST_FILE} bytes ({shown})"));
    }
    let text =
        std::str::from_utf8(&text).map_err(|_| format!("a file that is not text in UTF-8 ({shown})"))?;
    let line = text.strip_suffix('\n').unwrap_or(text);
    let password = line.strip_suffix('\r').unwrap_or(line);
    if password.is_empty() { Err(format!("an empty file ({shown})")) } else { Ok(password.to_owned().into()) }
}

/// Whether `given` is this password. Takes constant time for texts of the same length.
pub fn is_same(password: &SecretString, given: &[u8]) -> bool {
    password.expose_secret().as_bytes().ct_eq(given).into()
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn read_file(path: &Path) -> io::Result<(Zeroizing<Vec<u8>>, u32)> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    // A fixed capacity: a growing buffer would leave copies of the secret in freed memory.
    let mut text = Zeroizing::new(Vec::with_capacity(usize::try_from(LARGEST_FILE).unwrap_or(0) + 1));
    file.take(LARGEST_FILE + 1).read_to_end(&mut text)?;
    Ok((text, metadata.mode()))
}

/// Why a secret file cannot be used. Shows its path, never its content.
#[derive(Debug)]
pub struct SecretError {
    path: PathBuf,
    reason: Reason,
}

#[derive(Debug)]
enum Reason {
    Io(io::Error),
    Make(io::Error),
    Empty,
    TooLarge,
    NotBase64,
}

impl SecretError {
    /// Whether there is no such file.
    pub fn is_absent(&self) -> bool {
        matches!(&self.reason, Reason::Io(error) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Returns what was found, in the words of a [`crate::Problem`].
    pub fn found(&self) -> String {
        let path = self.path.display();
        match &self.reason {
            Reason::Io(error) => format!("a file that cannot be read ({path}: {error})"),
            Reason::Make(error) => format!("no file, and it cannot be created ({path}: {error})"),
            Reason::Empty => format!("an empty file ({path})"),
            Reason::TooLarge => format!("a file larger than {LARGEST_FILE} bytes ({path})"),
            Reason::NotBase64 => format!("a file that is not standard base64 with padding ({path})"),
        }
    }

    /// Returns what is expected.
    pub fn expected(&self) -> &'static str {
        match &self.reason {
            Reason::Io(_) => "a file that this process may read",
            Reason::Make(_) => "a state_dir that this process may write, or the path of a secret file",
            Reason::Empty | Reason::TooLarge | Reason::NotBase64 => {
                "one line of base64, for example from `openssl rand -base64 32`"
            }
        }
    }
}

impl fmt::Display for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "found {}; expected {}", self.found(), self.expected())
    }
}

impl std::error::Error for SecretError {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn file(content: &[u8], mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), content).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn base64_is_decoded_as_in_14_1() {
        for (content, bytes) in [
            (&b"aGVsbG8="[..], &b"hello"[..]),
            (b"aGVs\r\nbG8=\r\n", b"hello"),
            (b"\naGVsbG8=\n\n", b"hello"),
            // Go ignores the unused bits of the last character.
            (b"aGVsbG9=", b"hello"),
            (b"QQ==", b"A"),
        ] {
            assert_eq!(ApiSecret::read(file(content, 0o600).path()).unwrap().expose(), bytes, "{content:?}");
        }
    }

    #[test]
    fn invalid_base64_is_refused_without_showing_it() {
        for content in
            [&b""[..], b"\n", b"aGVsbG8", b"aGVs bG8=", b"aGVsbG8=x", b"hunter2!", b"_-_-", &[0xff; 40]]
        {
            let file = file(content, 0o600);
            let error = ApiSecret::read(file.path()).unwrap_err();
            let text = format!("{error} {error:?}").replace(&file.path().display().to_string(), "");
            assert!(text.contains("openssl rand"), "{text}");
            for piece in ["hunter2", "aGVs", "_-_-"] {
                assert!(!text.contains(piece), "{text}");
            }
        }
        let large = file(&vec![b'A'; 70_000], 0o600);
        assert!(ApiSecret::read(large.path()).unwrap_err().to_string().contains("larger than 65536 bytes"));
        assert!(ApiSecret::read(Path::new("/")).is_err());
    }

    #[test]
    fn debug_shows_nothing() {
        let secret = ApiSecret::read(file(b"aHVudGVyMg==", 0o600).path()).unwrap();
        assert_eq!(format!("{secret:?}"), "ApiSecret(not shown)");
    }

    #[test]
    fn short_typed_and_open_secrets_have_faults() {
        let random: Vec<u8> = (0..32).collect();
        let faults = |bytes: &[u8], mode| -> Vec<String> {
            let file = file(BASE64.encode(bytes).as_bytes(), mode);
            let secret = ApiSecret::read(file.path()).unwrap();
            let shown = file.path().display().to_string();
            secret.faults().iter().map(|fault| fault.found.replace(&shown, "FILE")).collect()
        };
        for mode in [0o600, 0o440, 0o640] {
            assert_eq!(faults(&random, mode), [""; 0]);
        }
        // Hexadecimal digits are random enough: some secrets are encoded so before base64.
        assert_eq!(faults(b"0123456789abcdef0123456789abcdef", 0o600), [""; 0]);
        let open = "a secret file that everyone on this host may read (mode 0644, FILE)";
        assert_eq!(faults(&random, 0o644), [open]);
        assert_eq!(faults(b"hello", 0o600), ["a secret of 5 bytes (FILE)"]);
        assert_eq!(faults(b"hello", 0o644), ["a secret of 5 bytes (FILE)", open]);
        let typed = "a secret that is not random: it has only 1 different bytes (FILE)";
        assert_eq!(faults(&[0; 32], 0o600), [typed]);
        let typed = "a secret that is not random: it has only 7 different bytes (FILE)";
        assert_eq!(faults(b"changemechangemechangemechangemechangeme", 0o600), [typed]);
    }

    #[test]
    fn a_generated_secret_is_private_random_and_permanent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/kas/api-secret");
        let (made, created) = load_or_create(&path).unwrap();
        assert_eq!(created, Created::Yes);
        assert_eq!(made.expose().len(), BYTES);
        assert_eq!(made.warnings().count(), 0);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o7777, 0o700);
        let (again, created) = load_or_create(&path).unwrap();
        assert_eq!((again, created), (made, Created::No));
        let (other, _) = load_or_create(&folder.path().join("other")).unwrap();
        assert_ne!(other.expose(), load_or_create(&path).unwrap().0.expose());
        // No temporary file remains.
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn processes_that_start_together_agree_on_one_secret() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api-secret");
        let all: Vec<_> = std::thread::scope(|scope| {
            let start = |_| scope.spawn(|| load_or_create(&path).unwrap());
            let threads: Vec<_> = (0..8).map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|(secret, _)| secret == &all[0].0));
        assert_eq!(all.iter().filter(|(_, created)| *created == Created::Yes).count(), 1);
    }

    #[test]
    fn a_broken_secret_file_is_never_replaced() {
        let broken = file(b"not base64", 0o600);
        assert!(load_or_create(broken.path()).is_err());
        assert_eq!(fs::read(broken.path()).unwrap(), b"not base64");
    }
}
