//! Section `observability.audit`.

use std::path::PathBuf;

use settings::walk::Section;

const NOT_AUDITED: &str = "output is empty or off, so there is no audit log";

/// Section `observability.audit`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// Where its lines are written.
    pub output: AuditOutput,
    /// Maximum number of lines that wait to be written; at least one.
    pub queue: u32,
}

/// Key `observability.audit.output`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditOutput {
    /// Standard output.
    Stdout,
    /// A file; lines are appended.
    File(PathBuf),
}

/// Declares the keys of the section.
pub(super) fn audit(s: &mut Section<'_, '_>) -> Option<Audit> {
    const EXPECTED: &str = "off, stdout, or the path of a file that begins with `/` or `./`";
    let text = s.text(
        "output",
        "",
        "Where it is written. Empty or off: nowhere. stdout, or the path of a file (mode 0600): lines are appended, \
         and the file is opened again on SIGHUP or after it was renamed.",
    );
    let output = match text.as_str() {
        "" | "off" => None,
        "stdout" => Some(AuditOutput::Stdout),
        // Any other word is a mistake and not the name of a file.
        path if path.contains('/') => Some(AuditOutput::File(path.into())),
        _ => {
            s.refuse("output", EXPECTED);
            None
        }
    };
    let idle = (output.is_none() && !s.is_refused("output")).then_some(NOT_AUDITED);
    let queue = s.optional(idle, |s| {
        s.number(
            "queue",
            10_000,
            "Lines that may wait while the output is slow, up to 1000000. Further lines are dropped and counted; no \
             request waits.",
        )
    });
    if queue > 1_000_000 {
        s.refuse("queue", "a number from 1 to 1000000");
    }
    output.map(|output| Audit { output, queue })
}
