//! What every program needs: lifecycle, logs, the audit log, files that change, the clock, the version. This
//! crate depends on no other crate of the workspace.

pub mod audit_log;
pub mod clock;
pub mod error;
pub mod exposition;
pub mod files;
pub mod lifecycle;
pub mod open_files;
pub mod reload;
pub mod telemetry;
pub mod version;
