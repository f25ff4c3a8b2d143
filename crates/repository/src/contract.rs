//! The contract of [`Repository`]: each implementation runs this suite in its own tests.
//!
//! [`check`] runs all cases, each on a new repository. What a folder without Git does not have is left out for
//! it.

mod cases;
mod store;

use std::{pin::Pin, sync::Arc, time::Duration};

use async_trait::async_trait;

pub use self::store::{Git, Store, What};
use crate::Repository;

/// A kind of repositories that the contract checks.
#[async_trait]
pub trait Subject: Sync {
    /// Returns a new, empty repository. `default_branch`, without `refs/heads/`: what it is told to be that.
    async fn create(&self, default_branch: Option<&str>) -> Created;

    /// Makes the repository unreachable. By default its folder gets another name.
    async fn lose(&self, created: &Created) {
        let path = created.store.path();
        std::fs::rename(path, path.with_extension("lost")).expect("a folder can be renamed");
    }

    /// Makes it reachable again.
    async fn recover(&self, created: &Created) {
        let path = created.store.path();
        std::fs::rename(path.with_extension("lost"), path).expect("a folder can be renamed");
    }

    /// Lets every call take at least this long from now on; zero ends it. False: that is not possible.
    async fn slow(&self, created: &Created, by: Duration) -> bool {
        let _ = (created, by);
        false
    }
}

/// A repository of the contract.
#[derive(Debug)]
pub struct Created {
    /// How it is read.
    pub repository: Arc<dyn Repository>,
    /// How it is written.
    pub store: Store,
}

impl Created {
    /// Returns its Git, if it has one.
    fn git(&self) -> Option<&Git> {
        match &self.store {
            Store::Git(git) => Some(git),
            Store::Folder(_) => None,
        }
    }
}

/// Runs all cases, one after the other.
///
/// # Panics
/// If one fails. Its name is printed before.
pub async fn check(subject: &dyn Subject) {
    type Case<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;
    macro_rules! cases {
        ($($name:ident),* $(,)?) => {
            [$((stringify!($name), Box::pin(cases::$name(subject)) as Case<'_>)),*]
        };
    }
    let all = cases![
        a_repository_without_commits_is_empty,
        without_a_head_the_default_branch_is_read_and_then_master,
        a_commit_stays_what_it_was,
        equal_ids_are_equal_contents,
        a_commit_may_go_between_two_calls,
        refs_and_tags_name_commits,
        limits_are_exact,
        files_of_several_mebibytes_are_whole,
        links_and_submodules_are_no_files,
        listings_are_in_the_order_of_git,
        unusual_names_are_kept,
        ten_thousand_files_are_listed_and_read,
        a_fingerprint_shows_changes,
        whoever_waits_for_changes_is_woken,
        a_lost_backend_is_an_error_until_it_is_back,
        a_slow_backend_is_waited_for,
    ];
    for (name, case) in all {
        // Shown only if a test fails: the location of a failed assertion is that of a helper.
        eprintln!("case: {name}");
        case.await;
    }
}
