//! Pure: floors of each crate, which say what a module may import, and the search for imports that break them.
//!
//! A crate is a list of floors, from the ground up. A module imports modules of its own floor and of lower ones, and
//! no modules import each other in a circle. Imports within one module and its submodules are its own affair. The
//! crate root may import everything, and no module imports from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::rules::{SourceFile, TidyFinding, error};

/// Floors of each crate, the ground floor first. A floor is a list of modules, or one folder (`name/`), whose
/// submodules are then the modules that may not form circles.
const FLOORS: &[(&str, &[&str])] = &[
    ("datapath", &["words load_balancing opaque_estimate", "h1", "h2 abi"]),
    (
        "common",
        &[
            "once_signal outbox request_log",
            "wire",
            "admin component fixtures local_node log replicas tls",
            "link",
            "enrollment probe",
        ],
    ),
    (
        "registry",
        &["credential_rules image_reference request_error", "credentials", "session", "client"],
    ),
    (
        "agent",
        &[
            "clock lock paths incompatible pod_gauge metrics config",
            "net/",
            "kernel/",
            "routes/",
            "usage/",
            "pods/",
            "connections/",
            "admin",
            "agent",
        ],
    ),
    ("controller", &["model/", "read/", "decide/", "write/", "shell/"]),
    (
        "activator",
        &[
            "budget clock entrypoint h1 request_error tcp_socket",
            "config metrics",
            "edge/",
            "clients/",
            "slots/",
            "pods/",
            "revisions/",
            "routes/",
            "requests/",
            "listeners/",
            "peer_streams route_stream",
        ],
    ),
    ("ebpf", &["maps sock_addr", "bind close connect packet sk_lookup", "count", "sock_ops"]),
    (
        "autoscaler",
        &[
            "config heartbeat window",
            "scaler usage scale_to_zero",
            "revision",
            "revisions",
            "evaluator",
            "usage_service admin",
        ],
    ),
    (
        "local",
        &[
            "addresses layout pods quantity sys",
            "cgroups dns net process",
            "bundle images runtime",
            "node",
            "kubelet",
        ],
    ),
    (
        "streams",
        &[
            "memory_io rng totals",
            "segmentation",
            "ebpf_model",
            "h1 h2",
            "targets shrink",
            "bulk_runs",
        ],
    ),
    (
        "hello",
        &["config request_counts request_ids requested_response", "app", "respond", "server"],
    ),
    (
        "rouse",
        &[
            "args command_error logging stdout table view",
            "documents kinds",
            "manifests",
            "store",
            "apply get",
            "component delete describe install logs run top",
            "up",
            "cli",
        ],
    ),
    (
        "tests",
        &[
            "wait",
            "fake_clock http_client leftovers load_process shared_folder test_cluster tunnel",
            "installed_cluster test_node",
            "flood knative_features multi_process_node rouse_node streaming_exchange",
            "mounted_app node_load",
        ],
    ),
    (
        "xtask",
        &[
            "load lock sh",
            "cold_start local_node machine measure toolchain workspace",
            "build_ebpf fuzz manifests setup tidy",
            "build ci image",
            "cluster",
            "bench demo",
            "chart monitoring servers",
            "test",
            "kernels",
        ],
    ),
];

/// Name under which the crate root stands.
const ROOT: &str = "the crate root";

/// A path of modules, from the crate root on.
type ModulePath = Vec<String>;

/// Imports of all files read so far, by crate.
#[derive(Debug, Default)]
pub(crate) struct ModuleFloors {
    crates: BTreeMap<String, CrateImports>,
}

/// Imports of one crate.
#[derive(Debug, Default)]
struct CrateImports {
    /// Paths of the modules that have a file.
    modules: BTreeSet<ModulePath>,
    /// The importing module, the imported path, and the place of the import.
    edges: Vec<(ModulePath, ModulePath, String)>,
}

/// Figures of one crate.
#[derive(Debug, Default, PartialEq, Eq)]
struct FloorFigures {
    modules: usize,
    floors: usize,
    imports: usize,
    upwards: usize,
    /// Modules that are part of a circle.
    circles: usize,
}

impl ModuleFloors {
    /// Adds the imports of a file of a crate's `src/`. Tests are skipped: they may use everything.
    pub(crate) fn read(&mut self, file: &SourceFile<'_>) -> Option<TidyFinding> {
        let path = module(file)?;
        let parsed = match syn::parse_file(file.text) {
            Ok(parsed) => parsed,
            Err(problem) => return Some(error(file.path, format!("is no Rust: {problem}"))),
        };
        let imports = self.crates.entry(file.krate.to_owned()).or_default();
        imports.modules.insert(path.clone());
        let mut reader =
            ImportCollector { path: &path, depth: 0, place: file.path, edges: &mut imports.edges };
        reader.visit_file(&parsed);
        None
    }

    /// Returns what breaks a rule.
    pub(crate) fn judge(&self) -> Vec<TidyFinding> {
        self.judge_by(FLOORS).flat_map(|(_, findings, _)| findings).collect()
    }

    /// Findings and figures of each crate.
    fn judge_by<'a>(
        &'a self,
        table: &'a [(&'a str, &'a [&'a str])],
    ) -> impl Iterator<Item = (&'a str, Vec<TidyFinding>, FloorFigures)> {
        self.crates.iter().map(|(name, imports)| {
            let floors = table.iter().find(|(it, _)| it == name).map(|(_, floors)| *floors);
            let (findings, figures) =
                CrateFloors::new(imports, floors.unwrap_or_default()).judge(name);
            (name.as_str(), findings, figures)
        })
    }
}

impl fmt::Display for ModuleFloors {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "| crate | modules | floors | imports | upwards | modules in circles |")?;
        write!(out, "|---|---|---|---|---|---|")?;
        for (name, _, FloorFigures { modules, floors, imports, upwards, circles }) in
            self.judge_by(FLOORS)
        {
            write!(out, "\n| {name} | {modules} | {floors} | {imports} | {upwards} | {circles} |")?;
        }
        Ok(())
    }
}

/// Modules of one crate on their floors.
struct CrateFloors<'a> {
    imports: &'a CrateImports,
    floors: &'a [&'a str],
    /// Imported modules of each module, with the places where it imports them.
    graph: BTreeMap<ModulePath, BTreeMap<ModulePath, Vec<&'a str>>>,
}

impl<'a> CrateFloors<'a> {
    fn new(imports: &'a CrateImports, floors: &'a [&'a str]) -> Self {
        let mut floors_of_crate = Self { imports, floors, graph: BTreeMap::new() };
        for path in &imports.modules {
            floors_of_crate.graph.entry(floors_of_crate.room(path)).or_default();
        }
        for (from, to, location) in &imports.edges {
            let (from, to) = (floors_of_crate.room(from), floors_of_crate.room(to));
            if from != to && !from.is_empty() {
                let locations =
                    floors_of_crate.graph.entry(from).or_default().entry(to).or_default();
                locations.push(location);
            }
        }
        floors_of_crate
    }

    /// The module that counts for `path`: the first of a path, or the first two where the first is a folder. The
    /// empty path is the crate root, which also owns each item that no module has.
    fn room(&self, path: &[String]) -> ModulePath {
        let Some(first) = path.first() else { return Vec::new() };
        let is_folder = self.floors.iter().any(|it| it.strip_suffix('/') == Some(first));
        let room = path[..path.len().min(if is_folder { 2 } else { 1 })].to_vec();
        if self.imports.modules.contains(&room) {
            return room;
        }
        let folder = vec![first.clone()];
        if self.imports.modules.contains(&folder) { folder } else { Vec::new() }
    }

    /// Number of a module's floor. The crate root is above all.
    fn floor(&self, room: &[String]) -> Option<usize> {
        let Some(first) = room.first() else { return Some(self.floors.len()) };
        let names = |floor: &&str| {
            floor.split_whitespace().any(|it| it.strip_suffix('/').unwrap_or(it) == first)
        };
        self.floors.iter().position(names)
    }

    fn judge(&self, name: &str) -> (Vec<TidyFinding>, FloorFigures) {
        let mut findings = Vec::new();
        let imports = self.graph.values().map(BTreeMap::len).sum();
        let modules = self.graph.keys().filter(|it| !it.is_empty()).count();
        let mut figures =
            FloorFigures { modules, floors: self.floors.len(), imports, ..FloorFigures::default() };
        for room in self.graph.keys().filter(|it| self.floor(it).is_none()) {
            let says = format!("{} has no floor in FLOORS of xtask/src/tidy/floors.rs", show(room));
            findings.push(error(name, says));
        }
        for (from, to, location) in self.upwards() {
            figures.upwards += 1;
            findings.push(error(
                location,
                format!("{} imports {}, which stands above it", show(from), show(to)),
            ));
        }
        for circle in self.circles() {
            figures.circles += circle.len();
            let names: Vec<String> = circle.iter().map(|it| show(it)).collect();
            findings.push(error(
                name,
                format!("these modules import each other in a circle: {}", names.join(", ")),
            ));
        }
        (findings, figures)
    }

    /// Imports of a module by one of a lower floor, or of the crate root by any, with the first place of each.
    fn upwards(&self) -> impl Iterator<Item = (&ModulePath, &ModulePath, &str)> {
        let imports =
            self.graph.iter().flat_map(|(from, imports)| imports.iter().map(move |it| (from, it)));
        imports.filter_map(|(from, (to, locations))| {
            let is_up = to.is_empty() || self.floor(to) > self.floor(from);
            is_up.then(|| (from, to, locations[0]))
        })
    }

    /// Groups of modules in which each imports all others, directly or by way of others.
    fn circles(&self) -> Vec<BTreeSet<&ModulePath>> {
        let reached: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
            self.graph.keys().map(|from| (from, self.reached(from))).collect();
        let mut circles = Vec::new();
        for (from, reachable) in &reached {
            let is_same_circle =
                |it: &&&ModulePath| reached.get(**it).is_some_and(|back| back.contains(from));
            let circle: BTreeSet<&ModulePath> =
                reachable.iter().filter(is_same_circle).copied().collect();
            if circle.first() == Some(from) {
                circles.push(circle);
            }
        }
        circles
    }

    /// Modules that `from` imports, directly or by way of others.
    fn reached<'b>(&'b self, from: &'b ModulePath) -> BTreeSet<&'b ModulePath> {
        let mut reached = BTreeSet::new();
        let mut open = vec![from];
        while let Some(next) = open.pop() {
            for to in self.graph.get(next).into_iter().flat_map(BTreeMap::keys) {
                if reached.insert(to) {
                    open.push(to);
                }
            }
        }
        reached
    }
}

fn show(path: &[String]) -> String {
    if path.is_empty() { ROOT.to_owned() } else { format!("`{}`", path.join("::")) }
}

/// The path of a file's module, if the file is part of the crate itself: no test, no further binary.
fn module(file: &SourceFile<'_>) -> Option<ModulePath> {
    let (_, inside) = file.path.split_once("/src/")?;
    let names: ModulePath = inside.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    let skipped = ["tests", "bin"];
    match names[0].as_str() {
        "lib" | "main" if names.len() == 1 => Some(Vec::new()),
        _ if names.iter().any(|it| skipped.contains(&it.as_str())) => None,
        _ => Some(names),
    }
}

/// Collects the imports of one file.
struct ImportCollector<'a> {
    path: &'a ModulePath,
    /// Number of inline modules around the current item.
    depth: usize,
    place: &'a str,
    edges: &'a mut Vec<(ModulePath, ModulePath, String)>,
}

impl ImportCollector<'_> {
    /// Adds the import of a path that begins with `crate` or `super`; others name items in scope or other crates.
    fn add(&mut self, path: &[String]) {
        let mut inline = self.depth;
        let mut base = self.path.clone();
        let ups = path.iter().take_while(|it| *it == "super").count();
        let rest = match path.first().map(String::as_str) {
            Some("crate") => {
                base.clear();
                &path[1..]
            }
            Some("super") => {
                for _ in 0..ups {
                    // A `super` inside an inline module leads out of that one only.
                    match inline.checked_sub(1) {
                        Some(left) => inline = left,
                        None => drop(base.pop()),
                    }
                }
                &path[ups..]
            }
            _ => return,
        };
        base.extend(rest.iter().cloned());
        self.edges.push((self.path.clone(), base, self.place.to_owned()));
    }

    fn add_tree(&mut self, before: &mut ModulePath, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.add_tree(before, &path.tree);
                before.pop();
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|it| self.add_tree(before, it));
            }
            syn::UseTree::Name(syn::UseName { ident, .. })
            | syn::UseTree::Rename(syn::UseRename { ident, .. }) => {
                before.push(ident.to_string());
                self.add(before);
                before.pop();
            }
            syn::UseTree::Glob(_) => self.add(before),
        }
    }

    /// Adds the paths in the arguments of a macro, which are tokens only.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path = ModulePath::new();
        // Colons since the last name of `path`: two of them and a name continue it.
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) if colons == 2 && !path.is_empty() => {
                    path.push(ident.to_string());
                    colons = 0;
                }
                other => {
                    self.add(&path);
                    path.clear();
                    colons = 0;
                    match other {
                        TokenTree::Ident(ident) => path.push(ident.to_string()),
                        TokenTree::Group(group) => self.add_tokens(group.stream()),
                        _ => {}
                    }
                }
            }
        }
        self.add(&path);
    }
}

impl<'ast> Visit<'ast> for ImportCollector<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let is_test = item.attrs.iter().any(|attribute| {
            attribute
                .meta
                .require_list()
                .is_ok_and(|list| list.tokens.to_string().starts_with("test"))
        });
        if !is_test {
            self.depth += 1;
            visit::visit_item_mod(self, item);
            self.depth -= 1;
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_tree(&mut ModulePath::new(), &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: ModulePath = path.segments.iter().map(|it| it.ident.to_string()).collect();
        self.add(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.add_tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }

    /// The path of a visibility, as in `pub(in crate::a)`, imports nothing.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Findings and figures of a crate with these files, by floors from the ground up.
    fn judge(files: &[(&str, &str)], floors: &[&str]) -> (Vec<String>, FloorFigures) {
        let mut all = ModuleFloors::default();
        for (path, text) in files {
            let path = format!("a/src/{path}");
            assert_eq!(all.read(&SourceFile { krate: "a", path: &path, text }), None);
        }
        let table = [("a", floors)];
        let (_, findings, figures) = all.judge_by(&table).next().unwrap();
        (findings.into_iter().map(|it| it.says).collect(), figures)
    }

    #[test]
    fn an_import_of_a_higher_floor_is_an_error_in_every_form() {
        let forms = [
            "use crate::top::X;",
            "use crate::{top};",
            "use crate::{low, top::{X as Y, Z}};",
            "use super::top::*;",
            "fn f() -> crate::top::X { todo!() }",
            "fn f() { println!(\"{}\", g(crate::top::X)) }",
            "mod inner { use super::super::top::X; }",
        ];
        for form in forms {
            let files = [("lib.rs", ""), ("low.rs", form), ("top.rs", "use crate::low;")];
            let (says, figures) = judge(&files, &["low", "top"]);
            assert_eq!(says[0], "`low` imports `top`, which stands above it", "{form}");
            assert_eq!((figures.upwards, figures.circles), (1, 2), "{form}");
        }
    }

    #[test]
    fn tests_may_import_everything_and_a_module_its_submodules() {
        let files = [
            ("lib.rs", "use crate::top::X;"),
            ("low.rs", "use self::part::X; #[cfg(test)] mod tests { use crate::top::X; }"),
            ("low/part.rs", "use super::Y; use crate::low::Z; pub(in crate::top) fn f() {}"),
            ("low/tests.rs", "use crate::top::X;"),
            ("top.rs", "use crate::low::X; use other::top;"),
        ];
        let figures = FloorFigures { modules: 2, floors: 2, imports: 1, upwards: 0, circles: 0 };
        assert_eq!(judge(&files, &["low", "top"]), (Vec::new(), figures));
    }

    #[test]
    fn no_module_imports_from_the_crate_root() {
        let (says, _) = judge(&[("lib.rs", ""), ("low.rs", "use crate::lock;")], &["low"]);
        assert_eq!(says, ["`low` imports the crate root, which stands above it"]);
    }

    #[test]
    fn modules_of_a_folder_form_no_circle() {
        let files = [
            ("lib.rs", ""),
            ("model.rs", "pub(crate) mod b;"),
            ("model/b.rs", "use super::c::X;"),
            ("model/c.rs", "use crate::model::b::X;"),
            ("top.rs", "use crate::model::c::X;"),
        ];
        let (says, figures) = judge(&files, &["model/", "top"]);
        assert_eq!(says, ["these modules import each other in a circle: `model::b`, `model::c`"]);
        assert_eq!((figures.circles, figures.upwards), (2, 0));
    }

    #[test]
    fn a_module_without_a_floor_is_an_error() {
        let files = [("lib.rs", ""), ("low.rs", ""), ("new.rs", "")];
        let (says, _) = judge(&files, &["low"]);
        assert_eq!(says, ["`new` has no floor in FLOORS of xtask/src/tidy/floors.rs"]);
    }
}
