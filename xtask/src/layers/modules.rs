//! The modules of one crate, what each imports of the others, and the cycles among them.
//!
//! Every item is read as the compiler parses it, so that comments and strings do not count. A path counts
//! where it stands: in `use`, in code, in the tokens of a macro, and in strings of attributes such as
//! `#[serde(with = "…")]`. A name that a module re-exports counts as an import of the module that it comes
//! from. Items under `#[cfg(test)]` do not count.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::{
    Attribute, Item, Meta, UseTree,
    visit::{self, Visit},
};

/// How many re-exports in a row are followed.
const HOPS: usize = 16;

/// The modules of one crate. The first is its root.
#[derive(Debug)]
pub(super) struct Modules(Vec<Module>);

#[derive(Debug)]
struct Module {
    name: String,
    parent: Option<usize>,
    /// Below the folder that the crate was read with.
    file: PathBuf,
    /// Whether its submodules are files in the same folder, as those of `lib.rs` and `mod.rs` are.
    owns_folder: bool,
    children: HashMap<String, usize>,
    /// What `use` binds here, in functions too: the name, and the path that it stands for.
    bindings: HashMap<String, Vec<String>>,
    /// Paths before `::*`.
    globs: Vec<Vec<String>>,
    /// Names of the items that are defined here.
    items: BTreeSet<String>,
    /// Every path of at least two segments.
    paths: Vec<Mention>,
}

#[derive(Debug, Clone)]
struct Mention {
    segments: Vec<String>,
    line: usize,
    /// Whether it is `use path::*` and not a re-export.
    hides_names: bool,
}

/// One import, for messages.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Import {
    pub(super) file: PathBuf,
    pub(super) line: usize,
    pub(super) path: String,
}

impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{} ({})", self.file.display(), self.line, self.path)
    }
}

/// The imports between siblings: importer and imported, each with its descendants.
type Edges = BTreeMap<(String, String), BTreeSet<Import>>;

/// Sibling modules that import each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cycle {
    /// The module that they are in; empty for the root.
    pub(super) parent: String,
    /// Every module that reaches every other one of these.
    pub(super) members: BTreeSet<String>,
    /// A shortest cycle. The last one imports the first one.
    pub(super) shortest: Vec<String>,
    /// Every import among the members.
    pub(super) edges: Edges,
}

/// What is known after all files of a crate are read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Findings {
    pub(super) modules: usize,
    /// Pairs of siblings of which one imports the other.
    pub(super) arrows: usize,
    pub(super) cycles: Vec<Cycle>,
    /// `use` of a module's names by `*`: what is imported cannot be seen.
    pub(super) globs: Vec<Import>,
}

impl Modules {
    /// Reads a crate from its root file. Messages show paths below `base`.
    ///
    /// # Errors
    /// When a file cannot be read or parsed, or a module has no file.
    pub(super) fn read(base: &Path, root: &Path) -> Result<Self> {
        let mut modules = Self(Vec::new());
        modules.read_file(base, root, None, "crate", true)?;
        Ok(modules)
    }

    fn read_file(
        &mut self,
        base: &Path,
        file: &Path,
        parent: Option<usize>,
        name: &str,
        owns_folder: bool,
    ) -> Result<()> {
        let shown = file.strip_prefix(base).unwrap_or(file);
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", shown.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| {
            anyhow::anyhow!("cannot parse {}:{}: {error}", shown.display(), error.span().start().line)
        })?;
        if for_tests(&parsed.attrs) {
            return Ok(());
        }
        let id = self.add(parent, name, shown, owns_folder);
        let mut reader = Reader { modules: self, base, module: id, failed: None };
        reader.visit_file(&parsed);
        reader.failed.map_or(Ok(()), Err)
    }

    fn add(&mut self, parent: Option<usize>, name: &str, file: &Path, owns_folder: bool) -> usize {
        let id = self.0.len();
        self.0.push(Module {
            name: name.to_owned(),
            parent,
            file: file.to_owned(),
            owns_folder,
            children: HashMap::new(),
            bindings: HashMap::new(),
            globs: Vec::new(),
            items: BTreeSet::new(),
            paths: Vec::new(),
        });
        if let Some(parent) = parent {
            self.0[parent].children.insert(name.to_owned(), id);
        }
        id
    }

    /// Returns the modules from the root's child to `id`.
    fn ancestry(&self, id: usize) -> Vec<usize> {
        let mut ancestry = Vec::new();
        let mut next = Some(id);
        while let Some(id) = next.filter(|id| *id != 0) {
            ancestry.push(id);
            next = self.0[id].parent;
        }
        ancestry.reverse();
        ancestry
    }

    /// Returns the module path, such as `config::files`; empty for the root.
    fn path(&self, id: usize) -> String {
        self.ancestry(id).iter().map(|id| self.0[*id].name.as_str()).collect::<Vec<_>>().join("::")
    }

    /// Adds to `reached` every module that a path goes through, and returns the last one and whether the path
    /// names that module itself. `None`: the path leads out of the crate.
    fn resolve(
        &self,
        from: usize,
        segments: &[String],
        hops: usize,
        reached: &mut Vec<usize>,
    ) -> Option<(usize, bool)> {
        let (first, mut rest) = segments.split_first()?;
        let (mut at, mut whole) = match first.as_str() {
            "crate" => (0, true),
            "self" => (from, true),
            "super" => (self.0[from].parent?, true),
            name => self.lookup(from, name, hops, reached)?,
        };
        while whole && let Some((next, others)) = rest.split_first() {
            reached.push(at);
            (at, whole) = match next.as_str() {
                "super" => (self.0[at].parent?, true),
                "self" => (at, true),
                // An item that no `use` and no definition shows, such as one made by a macro.
                name => self.lookup(at, name, hops, reached).unwrap_or((at, false)),
            };
            rest = others;
        }
        reached.push(at);
        Some((at, whole))
    }

    /// Returns where a name of a module comes from, and whether it is a module itself.
    fn lookup(&self, at: usize, name: &str, hops: usize, reached: &mut Vec<usize>) -> Option<(usize, bool)> {
        let module = &self.0[at];
        if let Some(child) = module.children.get(name) {
            return Some((*child, true));
        }
        if module.items.contains(name) {
            return Some((at, false));
        }
        let hops = hops.checked_sub(1)?;
        if let Some(path) = module.bindings.get(name) {
            // `use name` alone names a crate, or the binding itself.
            return if path.len() == 1 && path[0] == name {
                None
            } else {
                self.resolve(at, path, hops, reached)
            };
        }
        module.globs.iter().find_map(|path| {
            let mut through = Vec::new();
            let (target, whole) = self.resolve(at, path, hops, &mut through)?;
            let found = (whole && target != at).then(|| self.lookup(target, name, hops, &mut through))??;
            reached.append(&mut through);
            Some(found)
        })
    }

    /// Resolves every path and looks for cycles.
    pub(super) fn judge(&self) -> Findings {
        // By parent module.
        let mut edges: BTreeMap<usize, Edges> = BTreeMap::new();
        let mut globs = Vec::new();
        for (id, module) in self.0.iter().enumerate() {
            let from = self.ancestry(id);
            for mention in &module.paths {
                // What a `use` of an item binds was counted there.
                if module.bindings.contains_key(&mention.segments[0])
                    && self
                        .lookup(id, &mention.segments[0], HOPS, &mut Vec::new())
                        .is_some_and(|(_, whole)| !whole)
                {
                    continue;
                }
                let mut reached = Vec::new();
                let target = self.resolve(id, &mention.segments, HOPS, &mut reached);
                let import = || Import {
                    file: module.file.clone(),
                    line: mention.line,
                    path: mention.segments.join("::"),
                };
                if mention.hides_names && target.is_some_and(|(_, whole)| whole) {
                    globs.push(import());
                }
                for target in reached {
                    let to = self.ancestry(target);
                    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
                    if let (Some(importer), Some(imported)) = (from.get(common), to.get(common)) {
                        let parent = common.checked_sub(1).map_or(0, |last| from[last]);
                        let names = (self.0[*importer].name.clone(), self.0[*imported].name.clone());
                        edges.entry(parent).or_default().entry(names).or_default().insert(import());
                    }
                }
            }
        }
        Findings {
            modules: self.0.len(),
            arrows: edges.values().map(Edges::len).sum(),
            cycles: edges.iter().flat_map(|(parent, edges)| cycles(&self.path(*parent), edges)).collect(),
            globs,
        }
    }
}

/// Returns each set of siblings that reach each other.
fn cycles(parent: &str, edges: &Edges) -> Vec<Cycle> {
    let mut cycles: Vec<Cycle> = Vec::new();
    let names: BTreeSet<&str> = edges.keys().map(|(from, _)| from.as_str()).collect();
    for name in names {
        if cycles.iter().any(|cycle| cycle.members.contains(name)) {
            continue;
        }
        let reached = reach(edges, name);
        let members: BTreeSet<String> = reached
            .iter()
            .filter(|other| reach(edges, other).contains(name))
            .map(|other| (*other).to_owned())
            .collect();
        if members.is_empty() {
            continue;
        }
        let shortest = members.iter().filter_map(|member| way_back(edges, member)).min_by_key(Vec::len);
        let inside = |(from, to): &(String, String)| members.contains(from) && members.contains(to);
        cycles.push(Cycle {
            parent: parent.to_owned(),
            shortest: shortest.unwrap_or_default(),
            edges: edges
                .iter()
                .filter(|(pair, _)| inside(pair))
                .map(|(pair, at)| (pair.clone(), at.clone()))
                .collect(),
            members,
        });
    }
    cycles
}

/// Returns what a module imports, directly or not; with itself only when there is a way back.
fn reach<'a>(edges: &'a Edges, from: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from];
    while let Some(name) = open.pop() {
        for (importer, imported) in edges.keys() {
            if importer == name && reached.insert(imported.as_str()) {
                open.push(imported);
            }
        }
    }
    reached
}

/// Returns the shortest way from a module to itself, without its end.
fn way_back(edges: &Edges, start: &str) -> Option<Vec<String>> {
    let mut open = VecDeque::from([vec![start]]);
    let mut seen = BTreeSet::new();
    while let Some(way) = open.pop_front() {
        for (from, to) in edges.keys() {
            if Some(&from.as_str()) != way.last() {
                continue;
            }
            if to == start {
                return Some(way.iter().map(|name| (*name).to_owned()).collect());
            }
            if seen.insert(to.as_str()) {
                let mut longer = way.clone();
                longer.push(to);
                open.push_back(longer);
            }
        }
    }
    None
}

/// Fills in the modules of one file.
struct Reader<'a> {
    modules: &'a mut Modules,
    base: &'a Path,
    module: usize,
    failed: Option<anyhow::Error>,
}

impl Reader<'_> {
    fn here(&mut self) -> &mut Module {
        &mut self.modules.0[self.module]
    }

    fn mention(&mut self, segments: Vec<String>, line: usize, hides_names: bool) {
        if segments.len() > 1 || (hides_names && !segments.is_empty()) {
            self.here().paths.push(Mention { segments, line, hides_names });
        }
    }

    fn use_tree(&mut self, tree: &UseTree, prefix: &[String], public: bool) {
        let extended = |ident: &syn::Ident| {
            let mut path = prefix.to_vec();
            path.push(plain(ident));
            path
        };
        match tree {
            UseTree::Path(path) => self.use_tree(&path.tree, &extended(&path.ident), public),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.use_tree(tree, prefix, public)),
            UseTree::Name(name) => {
                let path = if name.ident == "self" { prefix.to_vec() } else { extended(&name.ident) };
                let bound = path.last().cloned().unwrap_or_default();
                self.bind(bound, path, name.ident.span().start().line);
            }
            UseTree::Rename(rename) => {
                let path = if rename.ident == "self" { prefix.to_vec() } else { extended(&rename.ident) };
                self.bind(plain(&rename.rename), path, rename.ident.span().start().line);
            }
            UseTree::Glob(glob) => {
                let line = glob.star_token.spans[0].start().line;
                self.here().globs.push(prefix.to_vec());
                self.mention(prefix.to_vec(), line, !public);
            }
        }
    }

    fn bind(&mut self, name: String, path: Vec<String>, line: usize) {
        self.here().bindings.insert(name, path.clone());
        self.mention(path, line, false);
    }

    /// Reads a module that is a file of its own.
    fn read_child(&mut self, item: &syn::ItemMod) -> Result<()> {
        let name = plain(&item.ident);
        let module = &self.modules.0[self.module];
        let (file, owned) = (self.base.join(&module.file), module.owns_folder);
        let folder = file.parent().context("a file is in a folder")?;
        // An inline module's files are in a folder of its name.
        let inline: Vec<String> = self.inline();
        let mut below = folder.to_owned();
        if !owned {
            below.push(file.file_stem().context("a file has a name")?);
        }
        below.extend(&inline);
        let explicit = item.attrs.iter().find_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
                _ => None,
            },
            _ => None,
        });
        let (file, owns_folder) = match explicit {
            Some(path) if inline.is_empty() => (folder.join(path), true),
            Some(path) => (below.join(path), true),
            None => {
                let file = below.join(format!("{name}.rs"));
                if file.is_file() { (file, false) } else { (below.join(&name).join("mod.rs"), true) }
            }
        };
        self.modules.read_file(self.base, &file, Some(self.module), &name, owns_folder)
    }

    /// Returns the names of the inline modules between the file and the present module.
    fn inline(&self) -> Vec<String> {
        let mut names = Vec::new();
        let mut at = self.module;
        while let Some(parent) = self.modules.0[at].parent
            && self.modules.0[parent].file == self.modules.0[at].file
        {
            names.push(self.modules.0[at].name.clone());
            at = parent;
        }
        names.reverse();
        names
    }

    /// Scans tokens that only a macro understands.
    fn tokens(&mut self, tokens: TokenStream, prefix: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let is_colon =
            |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(colon)) if colon.as_char() == ':');
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Group(group) => {
                    self.tokens(group.stream(), &[]);
                    at += 1;
                }
                TokenTree::Literal(literal) => {
                    // Attributes name functions in strings.
                    if let syn::Lit::Str(text) = syn::Lit::new(literal.clone())
                        && ["crate::", "super::", "self::"]
                            .iter()
                            .any(|start| text.value().starts_with(start))
                    {
                        let segments = text.value().split("::").map(str::to_owned).collect();
                        self.mention(segments, literal.span().start().line, false);
                    }
                    at += 1;
                }
                TokenTree::Ident(first) => {
                    let line = first.span().start().line;
                    let mut segments = prefix.to_vec();
                    segments.push(plain(first));
                    at += 1;
                    while is_colon(at) && is_colon(at + 1) {
                        match tokens.get(at + 2) {
                            Some(TokenTree::Ident(next)) => {
                                segments.push(plain(next));
                                at += 3;
                            }
                            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                                self.tokens(group.stream(), &segments);
                                at += 3;
                            }
                            _ => break,
                        }
                    }
                    self.mention(segments, line, false);
                }
                TokenTree::Punct(_) => at += 1,
            }
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if for_tests(attributes(item)) {
            return;
        }
        let name = match item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::TraitAlias(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            let name = plain(name);
            self.here().items.insert(name);
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if let Some((_, items)) = &item.content {
            let file = self.here().file.clone();
            let owns_folder = self.here().owns_folder;
            let outer = self.module;
            self.module = self.modules.add(Some(outer), &plain(&item.ident), &file, owns_folder);
            items.iter().for_each(|item| self.visit_item(item));
            self.module = outer;
        } else if let Err(error) = self.read_child(item) {
            self.failed.get_or_insert(error);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // `use ::name` names a crate.
        if item.leading_colon.is_none() {
            let public = !matches!(item.vis, syn::Visibility::Inherited);
            self.use_tree(&item.tree, &[], public);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none()
            && let Some(first) = path.segments.first()
        {
            let segments = path.segments.iter().map(|segment| plain(&segment.ident)).collect();
            self.mention(segments, first.ident.span().start().line, false);
        }
        visit::visit_path(self, path);
    }

    fn visit_token_stream(&mut self, tokens: &'ast TokenStream) {
        self.tokens(tokens.clone(), &[]);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if !["doc", "cfg"].iter().any(|name| attribute.path().is_ident(name)) {
            visit::visit_attribute(self, attribute);
        }
    }

    // `pub(in path)` names an ancestor only.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            syn::ImplItem::Macro(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        let attributes = match item {
            syn::TraitItem::Const(item) => &item.attrs,
            syn::TraitItem::Fn(item) => &item.attrs,
            syn::TraitItem::Type(item) => &item.attrs,
            syn::TraitItem::Macro(item) => &item.attrs,
            _ => &Vec::new(),
        };
        if !for_tests(attributes) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !for_tests(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !for_tests(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !for_tests(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        let attributes = match statement {
            syn::Stmt::Local(local) => &local.attrs,
            syn::Stmt::Macro(call) => &call.attrs,
            syn::Stmt::Expr(syn::Expr::Block(block), _) => &block.attrs,
            syn::Stmt::Expr(syn::Expr::Call(call), _) => &call.attrs,
            syn::Stmt::Expr(syn::Expr::MethodCall(call), _) => &call.attrs,
            syn::Stmt::Expr(syn::Expr::If(branch), _) => &branch.attrs,
            _ => &Vec::new(),
        };
        if !for_tests(attributes) {
            visit::visit_stmt(self, statement);
        }
    }
}

/// Returns an identifier without `r#`.
fn plain(ident: &syn::Ident) -> String {
    let text = ident.to_string();
    text.strip_prefix("r#").map_or_else(|| text.clone(), str::to_owned)
}

/// Whether something is compiled for tests only.
fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => needs_test(list.tokens.clone()),
        // `#[test]`, `#[tokio::test]`.
        meta => meta.path().segments.last().is_some_and(|last| last.ident == "test"),
    })
}

/// Whether a condition of `cfg` holds in tests only: `test`, or `all(…, test, …)`.
fn needs_test(condition: TokenStream) -> bool {
    let tokens: Vec<TokenTree> = condition.into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Ident(test)] => test == "test",
        [TokenTree::Ident(all), TokenTree::Group(conditions)] if all == "all" => {
            let conditions: Vec<TokenTree> = conditions.stream().into_iter().collect();
            conditions
                .split(|token| matches!(token, TokenTree::Punct(comma) if comma.as_char() == ','))
                .any(|condition| needs_test(condition.iter().cloned().collect()))
        }
        _ => false,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Judges a crate made of these files.
    fn judge(files: &[(&str, &str)]) -> Findings {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = folder.path().join(files[0].0);
        Modules::read(folder.path(), &root).unwrap().judge()
    }

    /// Returns the parent and the members of each cycle.
    fn cycles(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        let cycles = judge(files).cycles.into_iter();
        cycles.map(|cycle| (cycle.parent, cycle.members.into_iter().collect())).collect()
    }

    fn cycle(parent: &str, members: &[&str]) -> Vec<(String, Vec<String>)> {
        vec![(parent.to_owned(), members.iter().map(|name| (*name).to_owned()).collect())]
    }

    const AB: (&str, &str) = ("src/lib.rs", "mod a;\nmod b;\n");

    #[test]
    fn two_modules_that_import_each_other_are_a_cycle() {
        let found = judge(&[
            AB,
            ("src/a.rs", "//! A.\n\nuse crate::b::B;\npub struct A(B);\n"),
            ("src/b.rs", "pub struct B;\nfn f() -> Option<crate::a::A> { None }\n"),
        ]);
        assert_eq!(found.cycles.len(), 1);
        let cycle = &found.cycles[0];
        assert_eq!(cycle.shortest, ["a", "b"]);
        let at = |from: &str, to: &str| {
            let imports = &cycle.edges[&(from.to_owned(), to.to_owned())];
            imports.iter().map(Import::to_string).collect::<Vec<_>>()
        };
        assert_eq!(at("a", "b"), ["src/a.rs:3 (crate::b::B)"]);
        assert_eq!(at("b", "a"), ["src/b.rs:2 (crate::a::A)"]);
    }

    #[test]
    fn imports_in_one_direction_are_no_cycle() {
        let found = judge(&[
            AB,
            ("src/a.rs", "use crate::b::B;\npub struct A(B);\n"),
            ("src/b.rs", "pub struct B;\n"),
        ]);
        assert_eq!(found, Findings { modules: 3, arrows: 1, ..Findings::default() });
    }

    #[test]
    fn comments_and_strings_do_not_count() {
        let b = "//! See [`crate::a::A`].\n/// `crate::a::A`\npub const B: &str = \"crate::a::A\"; // crate::a::A\n";
        assert_eq!(cycles(&[AB, ("src/a.rs", "pub use super::b::B as A;\n"), ("src/b.rs", b)]), []);
    }

    #[test]
    fn a_longer_cycle_is_shown_by_its_shortest_path() {
        let found = judge(&[
            ("src/main.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
            ("src/a.rs", "use crate::b::B;\n"),
            ("src/b.rs", "use super::c::C;\n"),
            ("src/c.rs", "use crate::{a::A, b};\n"),
            ("src/d.rs", "use crate::a::A;\n"),
        ]);
        assert_eq!(found.cycles.len(), 1);
        assert_eq!(found.cycles[0].members.iter().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(found.cycles[0].shortest, ["b", "c"]);
    }

    #[test]
    fn cycles_inside_a_module_are_found() {
        let files = [
            ("src/lib.rs", "pub mod outer;\n"),
            ("src/outer.rs", "mod a;\nmod b { mod deep { use super::super::a::A; } pub struct B; }\n"),
            ("src/outer/a.rs", "pub struct A;\nuse super::b::B;\n"),
        ];
        assert_eq!(cycles(&files), cycle("outer", &["a", "b"]));
    }

    #[test]
    fn modules_count_with_their_descendants() {
        let files = [
            ("src/lib.rs", "mod a;\nmod b;\n"),
            ("src/a/mod.rs", "mod inner;\n"),
            ("src/a/inner.rs", "use crate::b::B;\n"),
            ("src/b.rs", "pub struct B;\nmod deep;\n"),
            ("src/b/deep.rs", "fn f() { crate::a::g() }\n"),
        ];
        assert_eq!(cycles(&files), cycle("", &["a", "b"]));
    }

    #[test]
    fn a_module_and_its_descendants_may_import_each_other() {
        let files = [
            ("src/lib.rs", "mod a;\nuse a::inner::I;\npub struct Root;\n"),
            ("src/a.rs", "pub mod inner;\nuse inner::I;\npub struct A;\n"),
            ("src/a/inner.rs", "use super::A;\nuse crate::Root;\npub struct I;\n"),
        ];
        assert_eq!(cycles(&files), []);
    }

    #[test]
    fn items_for_tests_do_not_count() {
        let files = [
            AB,
            ("src/a.rs", "use crate::b::B;\n"),
            (
                "src/b.rs",
                "pub struct B { #[cfg(test)] seen: crate::a::A, other: u8 }\n\
                 #[cfg(test)]\nuse crate::a::A;\n\
                 #[cfg(all(unix, test))]\nmod with;\n\
                 #[cfg(test)]\nmod tests;\n\
                 impl B { #[cfg(test)] fn f() { crate::a::f() } }\n\
                 fn g() { #[cfg(test)] crate::a::f(); #[cfg(test)] let x = crate::a::X; }\n\
                 #[tokio::test]\nasync fn h() { crate::a::f() }\n",
            ),
            ("src/b/tests.rs", "use crate::a::A;\n"),
        ];
        assert_eq!(cycles(&files), []);
        let product = [AB, files[1], ("src/b.rs", "#[cfg(not(test))]\nuse crate::a::A;\npub struct B;\n")];
        assert_eq!(cycles(&product), cycle("", &["a", "b"]));
    }

    #[test]
    fn a_file_for_tests_does_not_count() {
        let files =
            [AB, ("src/a.rs", "use crate::b::B;\n"), ("src/b.rs", "#![cfg(test)]\nuse crate::a::A;\n")];
        assert_eq!(cycles(&files), []);
    }

    #[test]
    fn paths_in_macros_and_attributes_count() {
        for b in [
            "fn f() { tracing::info!(found = %crate::a::name(), \"done\") }\n",
            "async fn f() { tokio::select! { () = x => { if y { super::a::g().await } } } }\n",
            "macro_rules! m { () => { $crate::a::g() } }\n",
            "m! { use crate::{c, a::g}; }\n",
            "#[derive(Serialize)] struct B { #[serde(with = \"crate::a::seconds\")] b: u64 }\n",
            "#[derive(Args)] struct B { #[arg(value_parser = super::a::parse)] b: u64 }\n",
            "fn f() { crate::a::m!() }\n",
        ] {
            let files = [AB, ("src/a.rs", "use crate::b::B;\n"), ("src/b.rs", b)];
            assert_eq!(cycles(&files), cycle("", &["a", "b"]), "{b}");
        }
    }

    #[test]
    fn a_name_that_is_exported_again_comes_from_its_module() {
        for (root, b) in [
            ("mod a;\nmod b;\npub use a::A;\n", "use crate::A;\n"),
            ("mod a;\nmod b;\npub use a::A as Other;\n", "fn f(_: super::Other) {}\n"),
            ("mod a;\nmod b;\nuse a::inner;\n", "use crate::inner::A;\n"),
            ("mod a;\nmod b;\npub use a::*;\n", "use crate::A;\n"),
            ("mod a;\nmod b;\npub mod names { pub use crate::a::A; }\n", "use crate::names::A;\n"),
        ] {
            let files = [
                ("src/lib.rs", root),
                ("src/a.rs", "use crate::b::B;\npub struct A;\npub mod inner { pub struct A; }\n"),
                ("src/b.rs", b),
            ];
            let found = cycles(&files);
            assert_eq!(found.len(), 1, "{root}");
            assert!(["a", "b"].iter().all(|name| found[0].1.contains(&(*name).to_owned())), "{found:?}");
        }
    }

    #[test]
    fn names_of_other_crates_are_not_ours() {
        let files = [
            ("src/lib.rs", "mod a;\nmod http;\n"),
            ("src/a.rs", "use http::Request;\nfn f() -> ::http::Response { http::new() }\n"),
            ("src/http.rs", "use crate::a::A;\n"),
        ];
        assert_eq!(cycles(&files), []);
    }

    #[test]
    fn a_module_that_was_imported_is_followed() {
        let files = [
            ("src/lib.rs", "mod outer;\n"),
            ("src/outer.rs", "mod a;\nmod b;\n"),
            ("src/outer/a.rs", "use crate::outer;\nfn f() { outer::b::f() }\n"),
            ("src/outer/b.rs", "use super::a::f;\n"),
        ];
        assert_eq!(cycles(&files), cycle("outer", &["a", "b"]));
    }

    #[test]
    fn names_behind_an_asterisk_are_reported() {
        let found = judge(&[
            AB,
            ("src/a.rs", "use std::io::prelude::*;\nuse crate::b::*;\npub enum A { X }\nuse A::*;\n"),
            ("src/b.rs", "pub struct B;\n"),
        ]);
        let globs: Vec<String> = found.globs.iter().map(Import::to_string).collect();
        assert_eq!(globs, ["src/a.rs:2 (crate::b)"]);
    }

    #[test]
    fn a_module_without_a_file_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("lib.rs");
        fs::write(&root, "mod gone;\n").unwrap();
        let error = format!("{:#}", Modules::read(folder.path(), &root).unwrap_err());
        assert!(error.contains("gone"), "{error}");
    }
}
