//! `cargo xtask images`: builds the programs and images of a release, reproducibly.
//!
//! Programs are static and linked to glibc, so no musl target is needed and names are resolved as in other
//! programs. They are packed into an archive, and into one image from scratch each, by buildah, which needs
//! no daemon. Each program has a bill of materials ([`bom`]), beside it and in its image. The output is the
//! same for every build of a commit on machines with the same tools: paths, times, modes, owners, the CPU
//! properties that jemalloc would detect, and the certificate authorities are fixed. It depends on rustc, the
//! C compiler, glibc, and the compression of buildah.

mod bom;

use std::{
    collections::{BTreeMap, HashSet},
    env, fs,
    io::Write as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use clap::{Args, ValueEnum};
use serde_json::Value;
use tokio::time::Instant;

use devkit::{
    report::{human, line, quoted},
    workspace::{self, cargo, find_program},
};

const IMAGES_HELP: &str = "\
Examples:
  cargo xtask images                                      into target/images/amd64 (or arm64)
  cargo xtask images --prefix registry.example.com/ops    names such as registry.example.com/ops/kas
  cargo xtask images --target aarch64-unknown-linux-gnu   for arm64
  cargo xtask images --twice                              build twice, and compare

--target for another platform needs its standard library (`rustup target add`) and a C compiler, such as \
gcc-aarch64-linux-gnu.";

/// The programs. Each has an image of the same name.
const PROGRAMS: [&str; 3] = ["kas", "agentk", "kasctl"];

/// Arguments of `images`.
#[derive(Debug, Args)]
#[command(after_help = IMAGES_HELP)]
pub(crate) struct ImagesArgs {
    /// The platform that the programs run on [default: the platform of this machine]
    #[arg(long, value_enum, value_name = "TARGET")]
    target: Option<Target>,
    /// Profile of cargo: `dist` for a release, `dev` for the fastest build
    #[arg(long, default_value = "dist")]
    profile: String,
    /// Registry and path, which the image names start with
    #[arg(long, value_name = "REPOSITORY", default_value = "")]
    prefix: String,
    /// URL of the source code, for the label `source`; without it the images have no such label
    #[arg(long, value_name = "URL", env = "CI_PROJECT_URL")]
    source: Option<String>,
    /// PEM file with the certificate authorities that the images trust instead of Mozilla's list
    #[arg(long, value_name = "FILE")]
    authorities: Option<PathBuf>,
    /// Build programs, bills of materials and the archive only; does not need buildah
    #[arg(long)]
    no_images: bool,
    /// Allow uncommitted changes; the commit is then marked `-dirty`
    #[arg(long)]
    allow_dirty: bool,
    /// Build a second time, from a clone of the commit in another folder, and compare the results
    #[arg(long, conflicts_with = "allow_dirty")]
    twice: bool,
}

/// A platform that programs can be built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Target {
    /// x86-64
    #[value(name = "x86_64-unknown-linux-gnu")]
    Amd64,
    /// 64-bit ARM
    #[value(name = "aarch64-unknown-linux-gnu")]
    Arm64,
}

impl Target {
    fn host() -> Result<Self> {
        match (env::consts::OS, env::consts::ARCH) {
            ("linux", "x86_64") => Ok(Self::Amd64),
            ("linux", "aarch64") => Ok(Self::Arm64),
            (os, arch) => bail!("images are built on Linux, on x86-64 or 64-bit ARM; this is {os} on {arch}"),
        }
    }

    /// The name of the platform in rustc.
    fn triple(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64-unknown-linux-gnu",
            Self::Arm64 => "aarch64-unknown-linux-gnu",
        }
    }

    /// The name of the platform in images.
    fn arch(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The C compiler for the platform on this machine.
    fn c_compiler(self) -> Result<String> {
        if self == Self::host()? {
            return Ok(env::var("CC")
                .ok()
                .filter(|name| !name.is_empty())
                .unwrap_or_else(|| "cc".to_owned()));
        }
        // The names in Debian.
        Ok(match self {
            Self::Amd64 => "x86_64-linux-gnu-gcc",
            Self::Arm64 => "aarch64-linux-gnu-gcc",
        }
        .to_owned())
    }
}

/// The commit that is built, and the time that all files have.
#[derive(Debug, Clone)]
struct Stamp {
    /// The full hash.
    revision: String,
    /// As `--version` shows it.
    short: String,
    /// Seconds since 1970.
    epoch: u64,
    /// The same as RFC 3339.
    date: String,
}

impl Stamp {
    fn of(root: &Path, allow_dirty: bool) -> Result<Self> {
        let git = |arguments: &[&str]| output(Command::new("git").arg("-C").arg(root).args(arguments));
        let mut revision = git(&["rev-parse", "HEAD"]).context("images are built from a checkout of git")?;
        let mut short = git(&["rev-parse", "--short=12", "HEAD"])?;
        if !git(&["status", "--porcelain"])?.is_empty() {
            ensure!(
                allow_dirty,
                "there are uncommitted changes: commit them, or use --allow-dirty, which marks the build"
            );
            revision.push_str("-dirty");
            short.push_str("-dirty");
        }
        let epoch = match env::var("SOURCE_DATE_EPOCH") {
            Ok(given) => given,
            Err(_) => git(&["log", "-1", "--format=%ct"])?,
        };
        let epoch: u64 = epoch
            .parse()
            .with_context(|| format!("SOURCE_DATE_EPOCH is not a number of seconds: {epoch:?}"))?;
        let date =
            output(Command::new("date").args(["--utc", &format!("--date=@{epoch}"), "+%Y-%m-%dT%H:%M:%SZ"]))?;
        Ok(Self { revision, short, epoch, date })
    }
}

/// One build.
#[derive(Debug)]
struct Build<'a> {
    args: &'a ImagesArgs,
    target: Target,
    stamp: Stamp,
    /// The source code.
    root: PathBuf,
    /// The target folder of cargo.
    target_dir: PathBuf,
    /// The output folder.
    out: PathBuf,
}

/// The output of a build: files by name, and the digest of each image.
#[derive(Debug)]
struct Made {
    files: BTreeMap<String, PathBuf>,
    digests: BTreeMap<&'static str, String>,
}

/// Runs a program that must succeed. Returns its standard output without the final line break.
fn output(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let done = done.with_context(|| format!("cannot run {}", command.get_program().display()))?;
    ensure!(done.status.success(), "{} failed, see above", shown(command));
    Ok(String::from_utf8(done.stdout).context("its output is not UTF-8")?.trim_end().to_owned())
}

/// Returns a command as it is typed in a shell.
fn shown(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| quoted(&word.to_string_lossy())).collect::<Vec<_>>().join(" ")
}

/// Builds programs, archive and images.
pub(crate) fn run(args: &ImagesArgs) -> Result<ExitCode> {
    let target = args.target.map_or_else(Target::host, Ok)?;
    let mut needed = vec![("git", "git"), ("tar", "tar"), ("gzip", "gzip"), ("sha256sum", "coreutils")];
    if !args.no_images {
        needed.push(("buildah", "buildah"));
    }
    for (program, package) in needed {
        ensure!(
            find_program(program).is_some(),
            "images need {program} (on Debian: apt-get install {package}); --no-images builds the programs only"
        );
    }
    let root = workspace::root().to_owned();
    let images = workspace::target()?.join("images");
    let first = Build {
        args,
        target,
        stamp: Stamp::of(&root, args.allow_dirty)?,
        root: root.clone(),
        target_dir: images.join("build"),
        out: images.join(target.arch()),
    };
    let made = first.make()?;
    if args.twice {
        // All paths are different: those of the source code, the target folder and the output.
        let again = images.join("again");
        remove(&again)?;
        let clone = again.join("elsewhere/checkout");
        let (from, to) = (text(&root)?, text(&clone)?);
        output(Command::new("git").args(["clone", "--quiet", "--shared", "--no-checkout", from, to]))?;
        output(Command::new("git").args(["-C", to, "checkout", "--quiet", &first.stamp.revision]))?;
        let second = Build {
            root: clone.clone(),
            target_dir: again.join("cargo"),
            out: again.join("out"),
            stamp: Stamp::of(&clone, false)?,
            ..first
        };
        if !same(&made, &second.make()?)? {
            return Ok(ExitCode::FAILURE);
        }
        remove(&again)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Compares two builds, and prints the differences.
fn same(first: &Made, second: &Made) -> Result<bool> {
    let mut differs = Vec::new();
    let names: HashSet<&String> = first.files.keys().chain(second.files.keys()).collect();
    for name in names {
        let read = |made: &Made| made.files.get(name).map(fs::read).transpose();
        if read(first)? != read(second)? {
            differs.push(name.clone());
        }
    }
    for (image, digest) in &first.digests {
        if second.digests.get(image) != Some(digest) {
            differs.push(format!("the digest of the image {image}"));
        }
    }
    differs.sort();
    if differs.is_empty() {
        line(format_args!(
            "\ntwo builds in two folders: {} files and all digests are identical",
            first.files.len()
        ));
    } else {
        line(format_args!("\ntwo builds differ in: {}", differs.join(", ")));
    }
    Ok(differs.is_empty())
}

impl Build<'_> {
    fn make(&self) -> Result<Made> {
        remove(&self.out)?;
        folder(&self.out)?;
        let began = Instant::now();
        let (programs, built) = self.compile()?;
        line(format_args!("\nprograms, in {}:", human(began.elapsed())));
        let bills = bom::Bills::read(self, built)?;
        for program in PROGRAMS {
            let to = self.out.join(program);
            fs::copy(programs.path(program)?, &to).with_context(|| format!("cannot copy {program}"))?;
            mode(&to, 0o755)?;
            self.check(program, &to)?;
            line(format_args!("  {program:<8} {:>10}  {}", megabytes(&to)?, to.display()));
            write(&self.out.join(format!("{program}.cdx.json")), &bills.of(program, false)?)?;
        }
        self.archive()?;
        let mut digests = BTreeMap::new();
        if !self.args.no_images {
            self.build_contexts(&bills)?;
            line(format_args!("images:"));
            for program in PROGRAMS {
                digests.insert(program, self.image(program)?);
            }
            remove(&self.context())?;
            remove(&self.storage())?;
        }
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&self.out)? {
            let entry = entry?;
            files.insert(entry.file_name().to_string_lossy().into_owned(), entry.path());
        }
        let names: Vec<&String> = files.keys().collect();
        let sums = output(Command::new("sha256sum").current_dir(&self.out).arg("--").args(names))?;
        let file = self.out.join("SHA256SUMS");
        write(&file, format!("{sums}\n").as_bytes())?;
        files.insert("SHA256SUMS".to_owned(), file);
        Ok(Made { files, digests })
    }

    /// Compiles the programs. Returns them, and the ids of the packages that were compiled for their
    /// platform.
    fn compile(&self) -> Result<(workspace::Programs, HashSet<String>)> {
        let triple = self.target.triple();
        let mut command = cargo();
        // With a target, flags apply to the programs only. Macros and build scripts cannot be static.
        command.current_dir(&self.root).args(["build", "--locked", "--profile", &self.args.profile]);
        command.args(["--target", triple]).arg("--target-dir").arg(&self.target_dir);
        for program in PROGRAMS {
            command.args(["-p", program]);
        }
        // A later path takes precedence, so paths inside others come last.
        let cargo_home = env::var_os("CARGO_HOME").map(PathBuf::from);
        let cargo_home = match cargo_home {
            Some(home) => home,
            None => PathBuf::from(env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?)
                .join(".cargo"),
        };
        let sysroot = output(Command::new(rustc()).args(["--print", "sysroot"]))?;
        let paths = [
            (text(&cargo_home)?, "/cargo"),
            (&sysroot, "/rust"),
            (text(&self.root)?, "/kas"),
            (text(&self.target_dir)?, "/build"),
        ];
        let mut flags = vec!["-Ctarget-feature=+crt-static".to_owned(), "-Cstrip=symbols".to_owned()];
        flags.extend(paths.iter().map(|(from, to)| format!("--remap-path-prefix={from}={to}")));
        command.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
        let c_flags: Vec<String> =
            paths.iter().map(|(from, to)| format!("-ffile-prefix-map={from}={to}")).collect();
        let snake = triple.replace('-', "_");
        command.env(format!("CFLAGS_{snake}"), c_flags.join(" "));
        if self.target != Target::host()? {
            let compiler = self.target.c_compiler()?;
            for name in [format!("CC_{snake}"), format!("CARGO_TARGET_{}_LINKER", snake.to_uppercase())] {
                if env::var_os(&name).is_none() {
                    command.env(name, &compiler);
                }
            }
        }
        // jemalloc would detect these on the build machine. Addresses have 48 bits on Linux unless a program
        // requests more, and pages on ARM have up to 64 KiB.
        command.env("JEMALLOC_SYS_WITH_LG_VADDR", "48");
        if self.target == Target::Arm64 {
            command.env("JEMALLOC_SYS_WITH_LG_PAGE", "16");
        }
        command.env("KAS_COMMIT", &self.stamp.short).env("SOURCE_DATE_EPOCH", self.stamp.epoch.to_string());
        line(format_args!("building: {}", shown(&command)));
        let mut built = HashSet::new();
        // Artifacts for this machine, such as macros, are outside of the folder of the target.
        let ours = self.target_dir.join(triple);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let programs = runtime.block_on(workspace::build_seen(command, |artifact| {
            let files = artifact["filenames"].as_array().into_iter().flatten();
            if files.filter_map(Value::as_str).any(|file| Path::new(file).starts_with(&ours))
                && let Some(id) = artifact["package_id"].as_str()
            {
                built.insert(id.to_owned());
            }
        }))?;
        Ok((programs, built))
    }

    /// Checks that a program is static, contains no path of this machine, and prints its commit.
    fn check(&self, name: &str, program: &Path) -> Result<()> {
        let bytes = fs::read(program)?;
        ensure!(!has_dynamic_loader(&bytes).context("not a 64-bit ELF file")?, "{name} is not static");
        let home = env::var("HOME").unwrap_or_default();
        // A short path (`/`) occurs in every program.
        let paths = [
            text(&self.root)?,
            text(&self.target_dir)?,
            &format!("{home}/.cargo"),
            &format!("{home}/.rustup"),
        ];
        for path in paths.into_iter().filter(|path| path.len() > 3) {
            ensure!(
                !bytes.windows(path.len()).any(|part| part == path.as_bytes()),
                "{name} contains a path of this machine, {path}, so builds on other machines would differ"
            );
        }
        if self.target == Target::host()? {
            let said = output(Command::new(program).arg("--version"))?;
            ensure!(
                said.ends_with(&format!("commit: {}", self.stamp.short)),
                "unexpected output of {name} --version: {said:?}"
            );
        }
        Ok(())
    }

    /// Packs the programs, for hosts without containers.
    fn archive(&self) -> Result<()> {
        let name = format!("kas-{}-linux-{}", version(), self.target.arch());
        let packed = self.out.join("packed");
        let inside = packed.join(&name);
        folder(&inside)?;
        for program in PROGRAMS {
            for (file, bits) in [(program.to_owned(), 0o755), (format!("{program}.cdx.json"), 0o644)] {
                fs::copy(self.out.join(&file), inside.join(&file))?;
                mode(&inside.join(&file), bits)?;
            }
        }
        for file in [
            "LICENSE",
            "deploy/systemd/kas.service",
            "deploy/systemd/agentk.service",
            "deploy/systemd/sysusers.conf",
        ] {
            let from = self.root.join(file);
            write(&inside.join(from.file_name().context("the file has no name")?), &fs::read(&from)?)?;
        }
        let mut tar = self.tar(&self.out.join(format!("{name}.tar.gz")), &packed);
        // Without the name and time of the archive in its header.
        output(tar.arg("--use-compress-program=gzip --no-name -9").arg(&name))?;
        remove(&packed)
    }

    /// Returns a command that packs files of a folder, without properties of this machine or the current
    /// time. The caller adds the names of the files.
    fn tar(&self, file: &Path, folder: &Path) -> Command {
        let mut tar = Command::new("tar");
        tar.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--format=gnu"]);
        tar.arg(format!("--mtime=@{}", self.stamp.epoch));
        tar.arg("--file").arg(file).arg("--directory").arg(folder);
        tar
    }

    fn context(&self) -> PathBuf {
        self.out.join("context")
    }

    fn storage(&self) -> PathBuf {
        self.out.join("storage")
    }

    /// Creates the folders that the images are copied from.
    fn build_contexts(&self, bills: &bom::Bills) -> Result<()> {
        let authorities = match &self.args.authorities {
            Some(file) => {
                let given = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
                ensure!(
                    given.windows(27).any(|part| part == b"-----BEGIN CERTIFICATE-----"),
                    "{} contains no certificate in PEM",
                    file.display()
                );
                given
            }
            None => mozilla().into_bytes(),
        };
        for program in PROGRAMS {
            let at = self.context().join(program);
            let file = |path: &str, content: &[u8]| write(&at.join(path), content);
            let binary = format!("usr/local/bin/{program}");
            file(&binary, &fs::read(self.out.join(program))?)?;
            mode(&at.join(&binary), 0o755)?;
            // The first path that rustls-native-certs reads on Debian.
            file("etc/ssl/certs/ca-certificates.crt", &authorities)?;
            // /etc/hosts, which Kubernetes and Docker write, takes precedence. Without this file, glibc uses
            // DNS first.
            file("etc/nsswitch.conf", b"hosts: files dns\n")?;
            file(&format!("usr/share/licenses/{program}/LICENSE"), &fs::read(self.root.join("LICENSE"))?)?;
            if self.args.authorities.is_none() {
                file("usr/share/licenses/webpki-root-certs/LICENSE", &bills.licence_of_authorities()?)?;
            }
            // The path and name that scanners look for.
            file(&format!("usr/share/sbom/{program}.cdx.json"), &bills.of(program, true)?)?;
        }
        Ok(())
    }

    /// Builds the image of a program. Returns its digest.
    fn image(&self, program: &'static str) -> Result<String> {
        let prefix = self.args.prefix.trim_end_matches('/');
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let name = format!("{prefix}{program}:{}", version());
        let storage = self.storage();
        // A separate storage, so that nothing is left in the storage of the user. `vfs` needs neither mounts
        // nor kernel modules.
        let buildah = || {
            let mut command = Command::new("buildah");
            command.arg("--root").arg(storage.join("root")).arg("--runroot").arg(storage.join("run"));
            command.args(["--storage-driver", "vfs"]);
            command
        };
        let mut build = buildah();
        build.args([
            "bud",
            "--quiet",
            "--isolation",
            "chroot",
            "--format",
            "oci",
            "--layers=false",
            "--no-cache",
        ]);
        // Without a label with the version of buildah.
        build.args(["--identity-label=false", "--timestamp", &self.stamp.epoch.to_string()]);
        build.args(["--os", "linux", "--arch", self.target.arch(), "--target", program, "--tag", &name]);
        for (key, value) in self.labels(program)? {
            build.args(["--label", &format!("org.opencontainers.image.{key}={value}")]);
        }
        build.arg("--file").arg(self.root.join("deploy/images/Containerfile")).arg(self.context());
        output(&mut build)?;
        let (file, digest) = (self.out.join(format!("{program}.oci.tar")), storage.join("digest"));
        // buildah can write an archive too, but with the current time, so the folder is packed below.
        let layout = storage.join("layout").join(program);
        folder(&layout)?;
        let mut push = buildah();
        push.args(["push", "--quiet", "--digestfile"]).arg(&digest).arg(&name);
        push.arg(format!("oci:{}:{name}", text(&layout)?));
        output(&mut push)?;
        output(self.tar(&file, &layout).args(["blobs", "index.json", "oci-layout"]))?;
        let digest = fs::read_to_string(digest).context("buildah wrote no digest")?.trim().to_owned();
        line(format_args!("  {name}@{digest}  {}", megabytes(&file)?));
        write(&self.out.join(format!("{program}.digest")), format!("{digest}\n").as_bytes())?;
        Ok(digest)
    }

    fn labels(&self, program: &str) -> Result<Vec<(&'static str, String)>> {
        let metadata = workspace::metadata()?;
        let package = metadata["packages"].as_array().into_iter().flatten();
        let package = package
            .into_iter()
            .find(|package| package["name"] == program)
            .with_context(|| format!("cargo metadata has no package {program}"))?;
        let of = |key: &str| {
            package[key].as_str().map(str::to_owned).with_context(|| format!("{program} has no {key}"))
        };
        let mut labels = vec![
            ("title", program.to_owned()),
            ("description", of("description")?),
            ("version", version().to_owned()),
            ("revision", self.stamp.revision.clone()),
            ("created", self.stamp.date.clone()),
            ("licenses", of("license")?),
        ];
        labels.extend(self.args.source.clone().map(|url| ("source", url)));
        Ok(labels)
    }
}

/// The version of the workspace, which is the tag of the images, as the charts expect.
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// Returns the compiler that cargo uses.
fn rustc() -> std::ffi::OsString {
    env::var_os("RUSTC").filter(|name| !name.is_empty()).unwrap_or_else(|| "rustc".into())
}

/// Returns Mozilla's certificate authorities. They are from a crate, so Cargo.lock determines them, not the
/// build machine.
fn mozilla() -> String {
    let mut pem = String::new();
    for certificate in webpki_root_certs::TLS_SERVER_ROOT_CERTS {
        pem.push_str("-----BEGIN CERTIFICATE-----\n");
        let text = BASE64_STANDARD.encode(certificate);
        for part in text.as_bytes().chunks(64) {
            pem.push_str(std::str::from_utf8(part).expect("base64 is ASCII"));
            pem.push('\n');
        }
        pem.push_str("-----END CERTIFICATE-----\n");
    }
    pem
}

/// Returns whether a program has a dynamic loader (`PT_INTERP`), or `None` if it is not a little-endian
/// 64-bit ELF file.
fn has_dynamic_loader(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |at: usize| Some(usize::from(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?)));
    let table = usize::try_from(u64::from_le_bytes(elf.get(0x20..0x28)?.try_into().ok()?)).ok()?;
    let (size, count) = (half(0x36)?, half(0x38)?);
    for n in 0..count {
        let at = table.checked_add(n * size)?;
        if u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?) == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

/// Returns a path as text.
fn text(path: &Path) -> Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

fn megabytes(file: &Path) -> Result<String> {
    let tenths = fs::metadata(file)?.len() / 100_000;
    Ok(format!("{}.{} MB", tenths / 10, tenths % 10))
}

/// Creates a folder and its parents, readable for all users whatever the umask is.
fn folder(path: &Path) -> Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    folder(path.parent().context("the folder has no parent")?)?;
    fs::create_dir(path).with_context(|| format!("cannot create {}", path.display()))?;
    mode(path, 0o755)
}

/// Writes a file that is readable for all users.
fn write(path: &Path, content: &[u8]) -> Result<()> {
    folder(path.parent().context("the file has no folder")?)?;
    let mut file = fs::File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
    file.write_all(content).with_context(|| format!("cannot write {}", path.display()))?;
    mode(path, 0o644)
}

fn mode(path: &Path, bits: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(bits))
        .with_context(|| format!("cannot set the mode of {}", path.display()))
}

fn remove(path: &Path) -> Result<()> {
    if path.exists() {
        fs::remove_dir_all(path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_are_pem_with_lines_of_64_characters() {
        let pem = mozilla();
        let count = pem.matches("-----BEGIN CERTIFICATE-----\n").count();
        assert_eq!(count, webpki_root_certs::TLS_SERVER_ROOT_CERTS.len());
        assert!(count > 100, "{count}");
        assert!(pem.lines().all(|line| line.len() <= 64));
        let first: String = pem.lines().skip(1).take_while(|line| !line.starts_with('-')).collect();
        assert_eq!(
            BASE64_STANDARD.decode(first).unwrap(),
            webpki_root_certs::TLS_SERVER_ROOT_CERTS[0].as_ref()
        );
    }

    #[test]
    fn static_programs_have_no_dynamic_loader() {
        let mut elf = vec![0_u8; 0x40 + 2 * 0x38];
        elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
        elf[0x20] = 0x40; // the table of segments starts after the header
        elf[0x36] = 0x38;
        elf[0x38] = 2;
        elf[0x40] = 1; // PT_LOAD
        elf[0x78] = 2; // PT_DYNAMIC: a static position-independent program has it too
        assert_eq!(has_dynamic_loader(&elf), Some(false));
        elf[0x78] = 3;
        assert_eq!(has_dynamic_loader(&elf), Some(true));
        assert_eq!(has_dynamic_loader(&elf[..0x50]), None, "truncated");
        assert_eq!(has_dynamic_loader(b"#!/bin/sh"), None);
        // The test itself is not static.
        let this = fs::read(env::current_exe().unwrap()).unwrap();
        assert_eq!(has_dynamic_loader(&this), Some(true));
    }
}
