//! The number of files this process may open.

/// Raises the number of files this process may open to the maximum that the system allows, since each agent
/// needs one. Returns the limit.
pub fn raise_limit() -> u64 {
    rlimit::increase_nofile_limit(u64::MAX).unwrap_or(0)
}

/// Number of files for which the table is allocated at once; an entry has eight bytes.
const FILES: u64 = 32 * 1024;

/// Makes the kernel's table of this process' files as large as it may soon become, where the limit allows.
///
/// The kernel grows the table when a file does not fit (at 64 files, at 128 and so on). With several threads,
/// the call that opens that file waits for some milliseconds, and so does everything else on its thread. Call
/// this while there is one thread. It has no effect if `/dev/null` cannot be opened.
pub fn preallocate_table() {
    let most = raise_limit().min(FILES);
    if let Ok(file) = std::fs::File::open("/dev/null")
        && let Some(last) = most.checked_sub(1).and_then(|last| i32::try_from(last).ok())
    {
        // The file is closed at once; the table stays.
        drop(rustix::io::fcntl_dupfd_cloexec(&file, last));
    }
}
