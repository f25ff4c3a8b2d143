//! kas
