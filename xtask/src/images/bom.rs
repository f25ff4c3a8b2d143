//! Bills of materials in the format CycloneDX 1.6.
//!
//! A tool would read Cargo.lock or `cargo metadata`, which contain the packages for all features of all
//! crates and for all platforms. These bills list the packages that cargo compiled for the program, according
//! to its build messages, along the dependencies of the program. Packages that are used only at compile time
//! (macros, build scripts) are not included. Libraries that are linked but are not packages of cargo (glibc,
//! libgcc, the standard library of Rust) are.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use devkit::workspace::cargo;

use super::{Build, output, rustc, version};

/// The crate that the images take their authorities from.
const AUTHORITIES: &str = "webpki-root-certs";

/// The components of the programs.
#[derive(Debug)]
pub(super) struct Bills {
    /// Packages by their id.
    packages: HashMap<String, Value>,
    /// The normal dependencies of each package.
    depends: HashMap<String, Vec<String>>,
    /// Packages that were compiled for the platform of the programs.
    built: HashSet<String>,
    /// SHA-256 of the packages of crates.io, by name and version.
    checksums: HashMap<(String, String), String>,
    /// Linked libraries that are not packages.
    system: Vec<Value>,
    /// Whether the images contain Mozilla's certificate authorities.
    mozilla: bool,
    date: String,
    revision: String,
}

impl Bills {
    /// Reads the output of cargo and the compilers.
    pub(super) fn read(build: &Build<'_>, built: HashSet<String>) -> Result<Self> {
        let mut command = cargo();
        command.current_dir(&build.root).args(["metadata", "--locked", "--format-version", "1"]);
        command.args(["--filter-platform", build.target.triple()]);
        let metadata: Value =
            serde_json::from_str(&output(&mut command)?).context("cargo metadata printed no JSON")?;
        let lock = fs::read_to_string(build.root.join("Cargo.lock")).context("cannot read Cargo.lock")?;
        let mut bills = Self::of_metadata(&metadata, &lock, built)?;
        bills.system = system(build)?;
        bills.mozilla = build.args.authorities.is_none();
        bills.date.clone_from(&build.stamp.date);
        bills.revision.clone_from(&build.stamp.revision);
        Ok(bills)
    }

    fn of_metadata(metadata: &Value, lock: &str, built: HashSet<String>) -> Result<Self> {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let id = |value: &Value| value.as_str().map(str::to_owned).context("an id is not a string");
        let mut packages = HashMap::new();
        for package in list(&metadata["packages"]) {
            packages.insert(id(&package["id"])?, package);
        }
        let mut depends = HashMap::new();
        for node in list(&metadata["resolve"]["nodes"]) {
            let mut found = Vec::new();
            for dependency in list(&node["deps"]) {
                // Without dependencies of tests and build scripts.
                if list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null()) {
                    found.push(id(&dependency["pkg"])?);
                }
            }
            depends.insert(id(&node["id"])?, found);
        }
        Ok(Self {
            packages,
            depends,
            built,
            checksums: checksums(lock),
            system: Vec::new(),
            mozilla: true,
            date: String::new(),
            revision: String::new(),
        })
    }

    /// Returns the bill of a program or of its image as text.
    pub(super) fn of(&self, program: &str, image: bool) -> Result<Vec<u8>> {
        let mut text = serde_json::to_vec_pretty(&self.bill(program, image)?)?;
        text.push(b'\n');
        Ok(text)
    }

    fn bill(&self, program: &str, image: bool) -> Result<Value> {
        let root =
            self.packages.iter().find(|(id, package)| package["name"] == program && self.built.contains(*id));
        let (root, package) = root.with_context(|| format!("{program} was not compiled"))?;
        let mut seen = BTreeSet::from([root]);
        let mut left = vec![root];
        while let Some(id) = left.pop() {
            for found in self.linked(id) {
                if seen.insert(found) {
                    left.push(found);
                }
            }
        }
        let mut components = BTreeMap::new();
        let mut dependencies = BTreeMap::new();
        for id in seen {
            let reference = self.reference(id)?;
            let mut on = self.linked(id).map(|id| self.reference(id)).collect::<Result<Vec<_>>>()?;
            if id == root {
                on.extend(self.system.iter().filter_map(|part| part["bom-ref"].as_str().map(str::to_owned)));
            } else {
                components.insert(reference.clone(), self.component(id, "library")?);
            }
            on.sort();
            dependencies.insert(reference.clone(), json!({ "ref": reference, "dependsOn": on }));
        }
        for part in &self.system {
            let reference = part["bom-ref"].as_str().context("a component has no reference")?.to_owned();
            dependencies.insert(reference.clone(), json!({ "ref": reference, "dependsOn": [] }));
            components.insert(reference, part.clone());
        }
        if image && self.mozilla {
            let id = self.authorities()?;
            components.insert(self.reference(id)?, self.component(id, "data")?);
        }
        let mut program_component = self.component(root, "application")?;
        program_component["description"] = package["description"].clone();
        Ok(json!({
            "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "version": 1,
            "metadata": {
                "timestamp": self.date,
                "tools": { "components": [{ "type": "application", "name": "cargo xtask images", "version": version() }] },
                "component": program_component,
                "properties": [{ "name": "kas:revision", "value": self.revision }],
            },
            "components": components.into_values().collect::<Vec<_>>(),
            "dependencies": dependencies.into_values().collect::<Vec<_>>(),
        }))
    }

    /// Returns the dependencies of a package that were compiled.
    fn linked(&self, id: &str) -> impl Iterator<Item = &String> {
        self.depends.get(id).into_iter().flatten().filter(|id| self.built.contains(*id))
    }

    fn authorities(&self) -> Result<&String> {
        let found = self.packages.iter().find(|(_, package)| package["name"] == AUTHORITIES);
        Ok(found.with_context(|| format!("cargo metadata has no package {AUTHORITIES}"))?.0)
    }

    /// Returns the licence of the certificate authorities, which must be distributed with them.
    pub(super) fn licence_of_authorities(&self) -> Result<Vec<u8>> {
        let manifest = self.packages[self.authorities()?]["manifest_path"]
            .as_str()
            .context("the package has no manifest")?;
        let file = Path::new(manifest).with_file_name("LICENSE");
        fs::read(&file).with_context(|| format!("cannot read {}", file.display()))
    }

    fn name(&self, id: &str) -> Result<(&str, &str)> {
        let package = self.packages.get(id).with_context(|| format!("cargo metadata has no package {id}"))?;
        Ok((
            package["name"].as_str().context("a package has no name")?,
            package["version"].as_str().context("a package has no version")?,
        ))
    }

    /// Returns the reference of a package in a bill. A crate of this workspace has no purl, because a crate
    /// of the same name on crates.io is a different one.
    fn reference(&self, id: &str) -> Result<String> {
        let (name, version) = self.name(id)?;
        let ours = self.packages[id]["source"].is_null();
        Ok(if ours { format!("workspace:{name}@{version}") } else { format!("pkg:cargo/{name}@{version}") })
    }

    fn component(&self, id: &str, kind: &str) -> Result<Value> {
        let package = &self.packages[id];
        let (name, version) = self.name(id)?;
        let reference = self.reference(id)?;
        let mut component = json!({ "type": kind, "bom-ref": reference, "name": name, "version": version });
        if let Some(checksum) = self.checksums.get(&(name.to_owned(), version.to_owned())) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": checksum }]);
        }
        if let Some(licence) = package["license"].as_str() {
            // Cargo allows `/` for OR, which SPDX does not.
            component["licenses"] = json!([{ "expression": licence.replace('/', " OR ") }]);
        }
        if reference.starts_with("pkg:") {
            component["purl"] = reference.into();
        }
        if let Some(url) = package["repository"].as_str() {
            component["externalReferences"] = json!([{ "type": "vcs", "url": url }]);
        }
        Ok(component)
    }
}

/// Reads the checksums of a lock file.
fn checksums(lock: &str) -> HashMap<(String, String), String> {
    lock.split("[[package]]")
        .filter_map(|block| {
            let of = |key: &str| {
                let line = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
                line.and_then(|rest| rest.strip_suffix('"')).map(str::to_owned)
            };
            Some(((of("name")?, of("version")?), of("checksum")?))
        })
        .collect()
}

/// Returns the libraries that are linked into each program and are not packages of cargo.
fn system(build: &Build<'_>) -> Result<Vec<Value>> {
    let said = output(Command::new(rustc()).arg("-Vv"))?;
    let of = |key: &str| said.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    let rust = of("release:").context("rustc -Vv prints no release")?;
    let reference = format!("pkg:generic/rust-std@{rust}");
    let mut found = vec![json!({
        "type": "library",
        "bom-ref": reference,
        "name": "rust-std",
        "version": rust,
        "licenses": [{ "expression": "MIT OR Apache-2.0" }],
        "purl": reference,
        "externalReferences": [{ "type": "vcs", "url": "https://github.com/rust-lang/rust" }],
        "properties": [{ "name": "kas:commit", "value": of("commit-hash:").unwrap_or("unknown") }],
    })];
    let compiler = build.target.c_compiler()?;
    for (name, library, licence, ask) in [
        ("glibc", "libc.a", "LGPL-2.1-or-later", None),
        // Unwinds the stack after a panic.
        ("libgcc", "libgcc_eh.a", "GPL-3.0-or-later WITH GCC-exception-3.1", Some("-dumpfullversion")),
    ] {
        let file = output(Command::new(&compiler).arg(format!("-print-file-name={library}")))?;
        let file = fs::canonicalize(&file)
            .with_context(|| format!("{compiler} has no {library} (Debian: apt-get install libc6-dev)"))?;
        let (version, purl) = match debian(&file) {
            Some(package) => package,
            None => {
                let version = match ask {
                    Some(ask) => output(Command::new(&compiler).arg(ask))?,
                    None => glibc(&compiler)?,
                };
                (version.clone(), format!("pkg:generic/{name}@{version}"))
            }
        };
        found.push(json!({
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "licenses": [{ "expression": licence }],
            "purl": purl,
        }));
    }
    Ok(found)
}

/// Returns version and purl of the Debian package of a file. The version tells which patches the library has.
fn debian(file: &Path) -> Option<(String, String)> {
    let ask = |arguments: &[&str]| {
        let done = Command::new("dpkg-query").args(arguments).stderr(Stdio::null()).output().ok()?;
        done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
    };
    let found = ask(&["--search", file.to_str()?])?;
    let (package, _) = found.split_once(": ")?;
    let said = ask(&["--show", "--showformat=${Package} ${Version} ${Architecture}", package])?;
    let [name, version, arch] = said.split(' ').collect::<Vec<_>>().try_into().ok()?;
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let of = |key: &str| {
        release.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim_matches('"'))
    };
    let id = of("ID=").unwrap_or("debian");
    let distro = of("VERSION_ID=").map(|version| format!("&distro={id}-{version}")).unwrap_or_default();
    // According to the specification of purl; `+` would be a space.
    let encoded = version.replace('+', "%2B").replace(':', "%3A");
    Some((version.to_owned(), format!("pkg:deb/{id}/{name}@{encoded}?arch={arch}{distro}")))
}

/// Returns the version of glibc in the headers of the compiler.
fn glibc(compiler: &str) -> Result<String> {
    let empty: PathBuf = "/dev/null".into();
    let mut command = Command::new(compiler);
    command.args(["-E", "-dM", "-include", "features.h", "-x", "c"]).arg(empty);
    let said = output(&mut command)?;
    let of = |key: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(&format!("#define {key} ")));
        line.with_context(|| format!("{compiler} does not define {key}: is its C library glibc?"))
    };
    let (major, minor) = (of("__GLIBC__")?, of("__GLIBC_MINOR__")?);
    ensure!(!major.is_empty() && !minor.is_empty(), "{compiler} reports no version of glibc");
    Ok(format!("{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program, a crate of the workspace, a crate with a macro, and one for tests only.
    fn bills() -> Bills {
        let package = |name: &str, source: Value, licence: &str| json!({ "id": name, "name": name, "version": "1.2.3", "source": source, "license": licence, "description": "d" });
        let registry = || json!("registry+https://github.com/rust-lang/crates.io-index");
        let dependency =
            |name: &str, kind: Value| json!({ "pkg": name, "dep_kinds": [{ "kind": kind, "target": null }] });
        let metadata = json!({
            "packages": [
                package("program", Value::Null, "MIT"),
                package("ids", Value::Null, "MIT"),
                package("serde", registry(), "MIT/Apache-2.0"),
                package("derive", registry(), "MIT"),
                package("tester", registry(), "MIT"),
                package("unused", registry(), "MIT"),
                package("webpki-root-certs", registry(), "CDLA-Permissive-2.0"),
            ],
            "resolve": { "nodes": [
                { "id": "program", "deps": [
                    dependency("ids", Value::Null), dependency("tester", json!("dev")), dependency("unused", Value::Null),
                ] },
                { "id": "ids", "deps": [dependency("serde", Value::Null)] },
                { "id": "serde", "deps": [dependency("derive", Value::Null)] },
            ] },
        });
        let lock = "version = 4\n\n[[package]]\nname = \"ids\"\nversion = \"1.2.3\"\n\n[[package]]\nname = \"serde\"\n\
                    version = \"1.2.3\"\nsource = \"registry\"\nchecksum = \"abc\"\ndependencies = [\n \"derive\",\n]\n";
        // A macro is compiled for the build machine; a package of an unused feature is not compiled.
        let built = ["program", "ids", "serde", "tester"].map(str::to_owned).into();
        Bills::of_metadata(&metadata, lock, built).unwrap()
    }

    #[test]
    fn a_bill_lists_linked_packages_only() {
        let bill = bills().bill("program", false).unwrap();
        assert_eq!(bill["metadata"]["component"]["name"], "program");
        let names: Vec<_> = bill["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|part| part["bom-ref"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["pkg:cargo/serde@1.2.3", "workspace:ids@1.2.3"]);
        let serde = &bill["components"][0];
        assert_eq!(serde["hashes"], json!([{ "alg": "SHA-256", "content": "abc" }]));
        assert_eq!(serde["licenses"], json!([{ "expression": "MIT OR Apache-2.0" }]));
        assert_eq!(serde["purl"], "pkg:cargo/serde@1.2.3");
        assert!(bill["components"][1].get("purl").is_none(), "crates.io has a different crate of this name");
        assert_eq!(
            bill["dependencies"],
            json!([
                { "ref": "pkg:cargo/serde@1.2.3", "dependsOn": [] },
                { "ref": "workspace:ids@1.2.3", "dependsOn": ["pkg:cargo/serde@1.2.3"] },
                { "ref": "workspace:program@1.2.3", "dependsOn": ["workspace:ids@1.2.3"] },
            ])
        );
    }

    #[test]
    fn the_bill_of_an_image_includes_its_authorities() {
        let bill = bills().bill("program", true).unwrap();
        let data = bill["components"].as_array().unwrap().iter().find(|part| part["type"] == "data");
        assert_eq!(data.unwrap()["purl"], "pkg:cargo/webpki-root-certs@1.2.3");
        let mut own = bills();
        own.mozilla = false;
        assert!(!own.bill("program", true).unwrap().to_string().contains("webpki"));
    }

    #[test]
    fn a_program_that_was_not_compiled_has_no_bill() {
        assert!(bills().bill("derive", false).is_err());
    }
}
