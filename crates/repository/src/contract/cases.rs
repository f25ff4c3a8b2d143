//! The cases.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use super::{Created, Subject, What, store::text};
use crate::{
    Commit, Content, Depth, Entry, Error, Fingerprint, Kind, Listing, ReadLimits, RepoPath, Revision,
    Versioning,
};

/// How long a backend may take to be reachable again. A test waits for the event, not for this time.
const RECOVERY: Duration = Duration::from_secs(60);
const MANY: usize = 10_000;
const LARGE: ReadLimits = ReadLimits { file: 64 << 20, total: 256 << 20 };

fn path(path: impl AsRef<[u8]>) -> RepoPath {
    RepoPath::new(path).expect("paths of the contract are valid")
}

fn paths(all: &[&str]) -> Vec<RepoPath> {
    all.iter().map(path).collect()
}

async fn head(created: &Created) -> Commit {
    created.repository.resolve(&Revision::Head).await.expect("it can be read").expect("it has a commit")
}

async fn list(created: &Created, commit: &Commit, under: Option<&str>, depth: Depth) -> Listing {
    let under = under.map(path);
    created.repository.list(commit, under.as_ref(), depth, 100_000).await.expect("it can be listed")
}

/// Returns paths and kinds of the entries.
fn names(listing: &Listing) -> Vec<(String, Kind)> {
    assert!(listing.is_complete);
    listing.entries.iter().map(|entry| (entry.path.to_string(), entry.kind)).collect()
}

async fn read(created: &Created, commit: &Commit, all: &[&str], limits: ReadLimits) -> Vec<Content> {
    created.repository.read(commit, &paths(all), limits).await.expect("it can be read")
}

/// Returns what was read as text.
fn shown(contents: &[Content]) -> Vec<String> {
    contents
        .iter()
        .map(|content| match content {
            Content::Data { data, .. } => String::from_utf8_lossy(data).into_owned(),
            other => format!("{other:?}"),
        })
        .collect()
}

fn unknown() -> Commit {
    "0123456789abcdef0123456789abcdef01234567".parse().expect("these are 40 digits")
}

pub(super) async fn a_repository_without_commits_is_empty(subject: &dyn Subject) {
    let created = subject.create(Some("trunk")).await;
    let repository = &created.repository;
    let refs = [Revision::branch("main"), Revision::branch("trunk"), Revision::tag("v1")];
    for revision in refs.map(|revision| revision.expect("Git permits it")) {
        assert_eq!(repository.resolve(&revision).await, Ok(None), "{revision}");
    }
    assert_eq!(repository.resolve(&Revision::Commit(unknown())).await, Ok(None));
    let gone = Error::Gone(unknown());
    for depth in [Depth::Here, Depth::Below] {
        assert_eq!(repository.list(&unknown(), None, depth, 10).await, Err(gone.clone()));
        assert_eq!(repository.list(&unknown(), Some(&path("a")), depth, 10).await, Err(gone.clone()));
    }
    assert_eq!(repository.read(&unknown(), &paths(&["a", "b"]), LARGE).await, Err(gone));
    let file = repository.file(&Revision::Head, &path("a"), 10).await.expect("it is absent");
    assert_eq!(file.content, Content::Absent);
    assert_eq!(file.version.is_some(), repository.versioning() == Versioning::File);
    assert_eq!(repository.fingerprint(&Revision::Head, &path("a")).await, Ok(Fingerprint::Absent));
    if created.git().is_some() {
        assert_eq!(repository.resolve(&Revision::Head).await, Ok(None), "HEAD is unborn");
    } else {
        assert_eq!(list(&created, &head(&created).await, None, Depth::Below).await.entries, []);
    }
}

pub(super) async fn without_a_head_the_default_branch_is_read_and_then_master(subject: &dyn Subject) {
    let created = subject.create(Some("trunk")).await;
    let Some(git) = created.git() else { return };
    let master = git.commit("refs/heads/master", &[(b"a", text("master"))]);
    assert_eq!(head(&created).await, master);
    let trunk = git.commit("refs/heads/trunk", &[(b"a", text("trunk"))]);
    assert_eq!(head(&created).await, trunk);
    let main = git.commit("refs/heads/main", &[(b"a", text("main"))]);
    assert_eq!(head(&created).await, main);
    git.run(&["symbolic-ref", "HEAD", "refs/heads/absent"]);
    assert_eq!(head(&created).await, trunk);
    git.run(&["update-ref", "--no-deref", "HEAD", &master.to_string()]);
    assert_eq!(head(&created).await, master, "a detached HEAD");
    let file = created.repository.file(&Revision::Head, &path("a"), 10).await.expect("it is there");
    assert_eq!((file.version, shown(&[file.content])), (Some(master), vec!["master".to_owned()]));
}

pub(super) async fn a_commit_stays_what_it_was(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let repository = &created.repository;
    let first = created.store.write(&[(b"a", text("one")), (b"b", text("same"))]);
    let before = head(&created).await;
    assert_eq!(first.unwrap_or(before), before);
    let listed = list(&created, &before, None, Depth::Below).await;
    created.store.write(&[(b"a", text("two!")), (b"b", text("same")), (b"c", text(""))]);
    let after = head(&created).await;
    assert_ne!(before, after);
    assert_eq!(shown(&read(&created, &after, &["a", "b", "c"], LARGE).await), ["two!", "same", ""]);
    let old = repository.read(&before, &paths(&["a", "b", "c"]), LARGE).await;
    if created.git().is_some() {
        assert_eq!(shown(&old.expect("it exists")), ["one", "same", "Absent"]);
        assert_eq!(list(&created, &before, None, Depth::Below).await, listed);
        assert_eq!(repository.resolve(&Revision::Commit(before)).await, Ok(Some(before)));
    } else {
        assert_eq!(old, Err(Error::Gone(before)));
        assert_eq!(repository.list(&before, None, Depth::Below, 10).await, Err(Error::Gone(before)));
        assert_eq!(repository.resolve(&Revision::Commit(before)).await, Ok(None));
    }
    assert_eq!(repository.resolve(&Revision::Commit(after)).await, Ok(Some(after)));
}

pub(super) async fn equal_ids_are_equal_contents(subject: &dyn Subject) {
    let created = subject.create(None).await;
    created.store.write(&[(b"a", text("x")), (b"b/c", text("x")), (b"d", text("y"))]);
    let commit = head(&created).await;
    let listing = list(&created, &commit, None, Depth::Below).await;
    let ids: Vec<_> = listing.entries.iter().map(|entry| entry.id).collect();
    assert!(ids[0] == ids[1] && ids[1] != ids[2], "{ids:?}");
    let contents = read(&created, &commit, &["a", "b/c", "d"], LARGE).await;
    for (content, listed) in contents.iter().zip(ids) {
        assert!(matches!(content, Content::Data { id, .. } if *id == listed), "{content:?}");
    }
}

/// A force-push between two calls: the old commit is read as it was, or it has gone, and nothing else.
pub(super) async fn a_commit_may_go_between_two_calls(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let repository = &created.repository;
    created.store.write(&[(b"a", text("one")), (b"b/c", text("two"))]);
    let old = head(&created).await;
    let listed = list(&created, &old, None, Depth::Below).await;
    let new: [(&[u8], What); 2] = [(b"a", text("new")), (b"z", text("new"))];
    match created.git() {
        Some(git) => {
            let forced = git.force("refs/heads/main", &new);
            assert_eq!(head(&created).await, forced);
        }
        None => {
            created.store.write(&new);
        }
    }
    let new = head(&created).await;
    match repository.read(&old, &paths(&["a", "b/c"]), LARGE).await {
        Ok(contents) => assert_eq!(shown(&contents), ["one", "two"]),
        Err(error) => assert_eq!(error, Error::Gone(old)),
    }
    for under in [None, Some(path("b"))] {
        match repository.list(&old, under.as_ref(), Depth::Below, 10).await {
            Ok(listing) => assert!(listing.entries.iter().all(|entry| listed.entries.contains(entry))),
            Err(error) => assert_eq!(error, Error::Gone(old)),
        }
    }
    assert_eq!(shown(&read(&created, &new, &["a", "z", "b/c"], LARGE).await), ["new", "new", "Absent"]);
}

pub(super) async fn refs_and_tags_name_commits(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let repository = &created.repository;
    let Some(git) = created.git() else {
        let tag = Revision::tag("v1").expect("Git permits it");
        assert_eq!(repository.resolve(&tag).await, Ok(None));
        return;
    };
    let commit = git.commit("refs/heads/main", &[(b"a", text("one"))]);
    let id = commit.to_string();
    let other = git.commit("refs/heads/review/a-b", &[(b"a", text("two"))]);
    git.run(&["tag", "light", &id]);
    git.run(&["tag", "-a", "-m", "x", "annotated", &id]);
    git.run(&["tag", "-a", "-m", "x", "nested", "annotated"]);
    git.run(&["tag", "main", &other.to_string()]);
    git.run(&["tag", "folder", &git.run(&["rev-parse", "main^{tree}"])]);
    git.run(&["update-ref", "refs/merge-requests/1/head", &other.to_string()]);
    let tag = |name: &str| Revision::tag(name).expect("Git permits it");
    let branch = |name: &str| Revision::branch(name).expect("Git permits it");
    let full = |name: &str| Revision::full(name).expect("Git permits it");
    for (revision, expected) in [
        (tag("light"), Some(commit)),
        (tag("annotated"), Some(commit)),
        (tag("nested"), Some(commit)),
        (tag("main"), Some(other)),
        (tag("folder"), None),
        (tag("absent"), None),
        (branch("main"), Some(commit)),
        (branch("review/a-b"), Some(other)),
        (branch("review"), None),
        (branch("light"), None),
        (full("refs/merge-requests/1/head"), Some(other)),
        (full("refs/merge-requests/2/head"), None),
        (Revision::Commit(commit), Some(commit)),
        (Revision::Commit(unknown()), None),
    ] {
        assert_eq!(repository.resolve(&revision).await, Ok(expected), "{revision}");
    }
    // Packed, as in a repository that was cleaned up.
    git.run(&["gc", "--quiet"]);
    assert_eq!(repository.resolve(&tag("nested")).await, Ok(Some(commit)));
    assert_eq!(repository.resolve(&branch("review/a-b")).await, Ok(Some(other)));
    git.run(&["update-ref", "-d", "refs/heads/review/a-b"]);
    assert_eq!(repository.resolve(&branch("review/a-b")).await, Ok(None));
}

pub(super) async fn limits_are_exact(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let sizes = [("empty", 0), ("below", 999), ("exact", 1_000), ("above", 1_001)];
    let files: Vec<_> =
        sizes.iter().map(|(name, size)| (name.as_bytes(), What::File(vec![b'x'; *size]))).collect();
    created.store.write(&files);
    let commit = head(&created).await;
    let lens = |contents: Vec<Content>| -> Vec<Result<usize, (u64, u64)>> {
        contents
            .into_iter()
            .map(|content| match content {
                Content::Data { data, .. } => Ok(data.len()),
                Content::TooBig { size, limit } => Err((size, limit)),
                other => panic!("{other:?}"),
            })
            .collect()
    };
    let all = ["empty", "below", "exact", "above", "empty"];
    let get = async |file, total| lens(read(&created, &commit, &all, ReadLimits { file, total }).await);
    assert_eq!(get(1_000, 10_000).await, [Ok(0), Ok(999), Ok(1_000), Err((1_001, 1_000)), Ok(0)]);
    assert_eq!(get(1_001, 3_000).await, [Ok(0), Ok(999), Ok(1_000), Ok(1_001), Ok(0)]);
    // What is beyond the total ends the list.
    assert_eq!(get(1_001, 2_999).await, [Ok(0), Ok(999), Ok(1_000), Err((1_001, 1_000))]);
    assert_eq!(get(1_000, 999).await, [Ok(0), Ok(999), Err((1_000, 0))]);
    // A file that is larger than a file may be takes nothing from the total.
    assert_eq!(get(1_000, 1_999).await, [Ok(0), Ok(999), Ok(1_000), Err((1_001, 0)), Ok(0)]);
    assert_eq!(get(0, 0).await[..2], [Ok(0), Err((999, 0))]);

    for (limit, expected) in [(1_000, Ok(1_000)), (999, Err((1_000, 999)))] {
        let file = created.repository.file(&Revision::Head, &path("exact"), limit).await;
        assert_eq!(lens(vec![file.expect("it is there").content]), [expected]);
    }
    let shown = created.repository.shown(&path("above"));
    let file = created.repository.file(&Revision::Head, &path("above"), 1_000).await.expect("it is there");
    assert_eq!(
        file.content.into_data(&shown),
        Err(Error::User(format!("FileTooBig: TreeEntry: file is too big: {shown}: the limit is 1000 bytes")))
    );
}

pub(super) async fn files_of_several_mebibytes_are_whole(subject: &dyn Subject) {
    let created = subject.create(None).await;
    // Not compressible, so that it is as large on the way.
    let mut state = 1_u32;
    let data: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    })
    .take(3 << 20)
    .collect();
    created.store.write(&[(b"large", What::File(data.clone())), (b"small", text("x"))]);
    let commit = head(&created).await;
    let contents = read(&created, &commit, &["large", "small", "large"], LARGE).await;
    let data = Bytes::from(data);
    for at in [0, 2] {
        assert!(matches!(&contents[at], Content::Data { data: found, .. } if *found == data));
    }
    assert_eq!(shown(&contents[1..2]), ["x"]);
    // Its data come, or do not, and the next file is right either way.
    let limits = ReadLimits { file: 2 << 20, total: 100 };
    let contents = read(&created, &commit, &["large", "small"], limits).await;
    assert_eq!(contents[0], Content::TooBig { size: 3 << 20, limit: 100 });
    assert_eq!(shown(&contents[1..]), ["x"]);
}

pub(super) async fn links_and_submodules_are_no_files(subject: &dyn Subject) {
    let created = subject.create(None).await;
    if created.git().is_none() {
        return;
    }
    let files: [(&[u8], What); 6] = [
        (b"a/file", text("content")),
        (b"a/link", What::Symlink("file")),
        (b"a/outside", What::Symlink("/etc/hostname")),
        (b"folder", What::Symlink("a")),
        (b"module", What::Submodule),
        (b"run", What::Executable(b"#!".to_vec())),
    ];
    created.store.write(&files);
    let commit = head(&created).await;
    let expected: Vec<_> =
        files.iter().map(|(path, what)| (String::from_utf8_lossy(path).into_owned(), what.kind())).collect();
    assert_eq!(names(&list(&created, &commit, None, Depth::Below).await), expected);
    let all = ["a/link", "a/outside", "folder", "module", "a", "run", "folder/file", "module/x", "a/file/x"];
    let contents = read(&created, &commit, &all, LARGE).await;
    assert_eq!(
        contents[..5],
        [Kind::Symlink, Kind::Symlink, Kind::Symlink, Kind::Submodule, Kind::Folder].map(Content::NotAFile)
    );
    assert_eq!(shown(&contents[5..]), ["#!", "Absent", "Absent", "Absent"]);
    for under in ["folder", "module", "a/file", "run", "absent", "a/absent"] {
        for depth in [Depth::Here, Depth::Below] {
            assert_eq!(names(&list(&created, &commit, Some(under), depth).await), [], "{under}");
        }
    }
    let file = created.repository.file(&Revision::Head, &path("a/link"), 10).await.expect("it is there");
    assert_eq!(
        file.content.into_data("a/link"),
        Err(Error::User("UnexpectedTreeEntryType: TreeEntry: file is not a usual file: a/link".into()))
    );
    let file = created.repository.file(&Revision::Head, &path("absent"), 10).await.expect("it is absent");
    assert_eq!(file.version, Some(commit));
    assert_eq!(
        file.content.into_data("absent"),
        Err(Error::User("FileNotFound: TreeEntry: file/directory/ref not found: absent".into()))
    );
}

pub(super) async fn listings_are_in_the_order_of_git(subject: &dyn Subject) {
    let created = subject.create(None).await;
    // The folder `a` is between the files, and not where its name would be.
    let all = ["a-b", "a.b", "a/b/c", "a/d", "a0", "b", "z/y/x/w"];
    let files: Vec<_> = all.iter().map(|name| (name.as_bytes(), text(name))).collect();
    created.store.write(&files);
    let commit = head(&created).await;
    let files =
        |all: &[&str]| -> Vec<_> { all.iter().map(|name| ((*name).to_owned(), Kind::File)).collect() };
    assert_eq!(names(&list(&created, &commit, None, Depth::Below).await), files(&all));
    let here = list(&created, &commit, None, Depth::Here).await;
    let mut expected = files(&["a-b", "a.b", "a", "a0", "b", "z"]);
    expected[2].1 = Kind::Folder;
    expected[5].1 = Kind::Folder;
    assert_eq!(names(&here), expected);
    let below = list(&created, &commit, Some("a"), Depth::Below).await;
    assert_eq!(names(&below), files(&["a/b/c", "a/d"]));
    assert_eq!(
        names(&list(&created, &commit, Some("a"), Depth::Here).await),
        [("a/b".to_owned(), Kind::Folder), ("a/d".to_owned(), Kind::File)]
    );
    assert_eq!(names(&list(&created, &commit, Some("z/y"), Depth::Below).await), files(&["z/y/x/w"]));
    // A folder changes with what it holds.
    created.store.write(&[(b"a/b/c", text("other")), (b"a/d", text("a/d")), (b"z/y/x/w", text("z/y/x/w"))]);
    let after = list(&created, &head(&created).await, None, Depth::Here).await;
    let id = |listing: &Listing, name: &str| {
        listing.entries.iter().find(|entry| entry.path == path(name)).map(|entry| entry.id)
    };
    assert_ne!(id(&here, "a"), id(&after, "a"));
    assert_eq!(id(&here, "z"), id(&after, "z"));
}

pub(super) async fn unusual_names_are_kept(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let all: [&[u8]; 8] = [
        b" a b ",
        b"*?[x]",
        b"-rf",
        b":(top)a",
        "\u{e4}/\u{2026}".as_bytes(),
        b"\xff\xfe",
        b"a\nb",
        b"\"q\"",
    ];
    let mut sorted = all;
    sorted.sort_unstable();
    let files: Vec<_> = all.iter().map(|name| (*name, What::File(name.to_vec()))).collect();
    created.store.write(&files);
    let commit = head(&created).await;
    let listing = list(&created, &commit, None, Depth::Below).await;
    let found: Vec<&[u8]> = listing.entries.iter().map(|entry| entry.path.as_bytes()).collect();
    assert_eq!(found, sorted);
    let wanted: Vec<_> = sorted.iter().map(path).collect();
    let contents = created.repository.read(&commit, &wanted, LARGE).await.expect("it can be read");
    for (content, name) in contents.iter().zip(sorted) {
        assert!(matches!(content, Content::Data { data, .. } if *data == name), "{name:?}: {content:?}");
    }
}

pub(super) async fn ten_thousand_files_are_listed_and_read(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let all: Vec<String> = (0..MANY).map(|n| format!("d{:02}/f{n:05}.yaml", n % 100)).collect();
    let files: Vec<_> = all.iter().map(|name| (name.as_bytes(), text(name))).collect();
    created.store.write(&files);
    let commit = head(&created).await;
    let listing = list(&created, &commit, None, Depth::Below).await;
    assert!(listing.is_complete && listing.entries.len() == MANY);
    assert!(listing.entries.is_sorted_by_key(|entry| &entry.path));
    let get = async |most| {
        created.repository.list(&commit, None, Depth::Below, most).await.expect("it can be listed")
    };
    let exact = get(MANY).await;
    assert!(exact == listing);
    for most in [MANY - 1, 1_000, 1, 0] {
        let cut = get(most).await;
        assert!(!cut.is_complete && cut.entries == listing.entries[..most], "{most}");
    }
    // More than one call of Gitaly reads.
    let wanted: Vec<Entry> = listing.entries.iter().step_by(20).cloned().collect();
    let wanted_paths: Vec<_> = wanted.iter().map(|entry| entry.path.clone()).collect();
    let contents = created.repository.read(&commit, &wanted_paths, LARGE).await.expect("it can be read");
    assert_eq!(contents.len(), 500);
    for (content, entry) in contents.iter().zip(&wanted) {
        assert!(
            matches!(content, Content::Data { id, data } if *id == entry.id && *data == entry.path.as_bytes()),
            "{entry:?}"
        );
    }
    // The total counts over all calls: the 251st file is one too many.
    let size = all[0].len() as u64;
    let limits = ReadLimits { file: size, total: 250 * size + 1 };
    let contents = created.repository.read(&commit, &wanted_paths, limits).await.expect("it can be read");
    assert_eq!(contents.len(), 251);
    assert_eq!(contents[250], Content::TooBig { size, limit: 1 });
}

pub(super) async fn a_fingerprint_shows_changes(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let repository = &created.repository;
    let get = async |name: &str| {
        repository.fingerprint(&Revision::Head, &path(name)).await.expect("it can be read")
    };
    created.store.write(&[(b"a", text("one")), (b"b", text("x"))]);
    let first = get("a").await;
    assert_eq!(get("a").await, first);
    created.store.write(&[(b"a", text("longer")), (b"b", text("x"))]);
    let second = get("a").await;
    assert_ne!(second, first);
    let file = repository.file(&Revision::Head, &path("a"), 10).await.expect("it is there");
    match repository.versioning() {
        Versioning::Commit => {
            assert_eq!(second, get("b").await);
            assert_eq!(file.version, Some(head(&created).await));
        }
        Versioning::File => {
            assert_ne!(second, get("b").await);
            assert_eq!(get("absent").await, Fingerprint::Absent);
            // As long as it is the same file, whatever else changes.
            created.store.write(&[(b"a", text("longer"))]);
            let again = repository.file(&Revision::Head, &path("a"), 10).await.expect("it is there");
            assert_eq!(again, file);
        }
    }
}

pub(super) async fn whoever_waits_for_changes_is_woken(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let mut early = created.repository.changes();
    let told = created.repository.changes();
    assert!(!told.has_changed().expect("the repository lives"));
    created.repository.tell_changed();
    created.repository.tell_changed();
    timeout(RECOVERY, early.changed()).await.expect("it was told").expect("the repository lives");
    assert!(!early.has_changed().expect("the repository lives"), "once for all that came before");
    assert!(told.has_changed().expect("the repository lives"));
    assert!(!created.repository.changes().has_changed().expect("the repository lives"));
}

pub(super) async fn a_lost_backend_is_an_error_until_it_is_back(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let repository = &created.repository;
    created.store.write(&[(b"a", text("one"))]);
    let commit = head(&created).await;
    subject.lose(&created).await;
    let is_backend = |error: Error| matches!(error, Error::Backend { .. });
    assert!(is_backend(repository.resolve(&Revision::Head).await.expect_err("it is lost")));
    assert!(is_backend(repository.list(&commit, None, Depth::Below, 10).await.expect_err("it is lost")));
    assert!(is_backend(repository.read(&commit, &paths(&["a"]), LARGE).await.expect_err("it is lost")));
    subject.recover(&created).await;
    let deadline = Instant::now() + RECOVERY;
    while let Err(error) = repository.resolve(&Revision::Head).await {
        assert!(Instant::now() < deadline, "{error}");
    }
    assert_eq!(head(&created).await, commit);
    assert_eq!(shown(&read(&created, &commit, &["a"], LARGE).await), ["one"]);
}

pub(super) async fn a_slow_backend_is_waited_for(subject: &dyn Subject) {
    let created = subject.create(None).await;
    let repository = &created.repository;
    created.store.write(&[(b"a", text("one"))]);
    let commit = head(&created).await;
    let delay = Duration::from_millis(300);
    if !subject.slow(&created, delay).await {
        return;
    }
    let begun = Instant::now();
    // Calls that are given up do not hold up others.
    let given_up = timeout(Duration::from_millis(20), repository.resolve(&Revision::Head)).await;
    assert!(given_up.is_err());
    let (resolved, contents) =
        tokio::join!(repository.resolve(&Revision::Head), read(&created, &commit, &["a"], LARGE));
    assert_eq!((resolved, shown(&contents)), (Ok(Some(commit)), vec!["one".to_owned()]));
    assert!(begun.elapsed() >= delay);
    subject.slow(&created, Duration::ZERO).await;
    assert_eq!(head(&created).await, commit);
}
