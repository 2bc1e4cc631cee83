//! Pure: layers of each crate, and the check for imports of a higher layer and for import cycles.
//!
//! A crate is a list of layers, the lowest first. A module imports modules of its own layer and of lower ones, and
//! imports form no cycle. Imports between a module and its submodules are not checked. The crate root may import
//! everything, and no module imports from it.

mod imports;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use syn::visit::Visit as _;

use self::imports::{ImportCollector, module_path};
use super::rules::{SourceFile, TidyFinding, error};

/// Layers of each crate, the lowest first. A layer is a list of modules, or one folder (`name/`) of submodules, which
/// are then checked as modules of their own.
const LAYERS: &[(&str, &[&str])] = &[
    ("datapath", &["words load_balancing opaque_estimate", "h1", "h2 abi", "close_position"]),
    (
        "common",
        &[
            "decimal http_server once_signal outbox page_body quantity request_log service_routing \
             standby_watch thaw_query url_query",
            "wire",
            "admin certificates component fixtures local_node log replicas tls",
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
            "api_servers capabilities clock lock map_sizes paths incompatible pod_gauge service_facts \
             standby_page health metrics config",
            "net/",
            "kernel/",
            "routes/",
            "usage/",
            "pods/",
            "connections/",
            "node_check/",
            "admin",
            "agent",
        ],
    ),
    ("controller", &["model/", "read/", "decide/", "write/", "shell/"]),
    (
        "activator",
        &[
            "budget clock entrypoint grpc h1 request_error route_facts tcp_socket \
             traced_request",
            "config metrics",
            "edge/",
            "telemetry/",
            "tls/",
            "clients/",
            "slots/",
            "pods/",
            "revisions/",
            "routes/",
            "requests/",
            "listeners/",
            "agent_reports debug_pages peer_streams route_stream",
        ],
    ),
    (
        "ebpf",
        &[
            "maps sock_addr",
            "backend_choice",
            "refusal",
            "bind bound_connects close connect_records packet sk_lookup udp",
            "connect count",
            "sock_ops",
        ],
    ),
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
            "addresses container_log layout pods scoped_open sys",
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
        &["config echo request_counts request_ids requested_response", "app", "respond", "server"],
    ),
    (
        "rouse",
        &[
            "admin_pages args command_error logging stdout table view",
            "component_pages documents kinds",
            "manifests",
            "store",
            "apply get",
            "component delete describe install logs routes run services top trace",
            "check",
            "up",
            "cli",
        ],
    ),
    (
        "tests",
        &[
            "api_client kubectl_errors tls_files wait",
            "fake_clock frozen_pods http_client images leftovers load_process scenarios shared_folder stored_objects test_cluster tls_client tunnel",
            "client_pod host_programs test_node",
            "installed_cluster",
            "flood knative_features multi_process_node rouse_node streaming_exchange",
            "mounted_app node_load",
        ],
    ),
    (
        "xtask",
        &[
            "frozen_pods load lock sh",
            "cold_start local_node machine measure toolchain workspace",
            "build_ebpf fuzz manifests setup tidy",
            "build ci image",
            "cluster",
            "bench demo",
            "chart monitoring servers",
            "test",
            "conformance kernels",
        ],
    ),
];

/// Name of the crate root in findings.
const ROOT: &str = "the crate root";

/// Path of a module, from the crate root.
type ModulePath = Vec<String>;

/// Imports of all files read so far, by crate.
#[derive(Debug, Default)]
pub(crate) struct ModuleLayers {
    crates: BTreeMap<String, CrateImports>,
}

/// Imports of one crate.
#[derive(Debug, Default)]
struct CrateImports {
    /// Paths of the modules that have a file.
    modules: BTreeSet<ModulePath>,
    /// The importing module, the imported path, and the file of the import.
    edges: Vec<(ModulePath, ModulePath, String)>,
}

/// Figures of one crate.
#[derive(Debug, Default, PartialEq, Eq)]
struct LayerFigures {
    modules: usize,
    layers: usize,
    imports: usize,
    /// Imports of a module of a higher layer.
    upward_imports: usize,
    /// Modules that are part of an import cycle.
    modules_in_cycles: usize,
}

impl ModuleLayers {
    /// Adds the imports of a file of a crate's `src/`. Tests are skipped: they may use everything.
    pub(crate) fn add_file(&mut self, file: &SourceFile<'_>) -> Option<TidyFinding> {
        let path = module_path(file)?;
        let parsed = match syn::parse_file(file.text) {
            Ok(parsed) => parsed,
            Err(problem) => {
                let message = format!("cannot be parsed as Rust: {problem}");
                return Some(error(file.path, message));
            }
        };
        let imports = self.crates.entry(file.krate.to_owned()).or_default();
        imports.modules.insert(path.clone());
        let mut collector =
            ImportCollector { path: &path, depth: 0, file: file.path, edges: &mut imports.edges };
        collector.visit_file(&parsed);
        None
    }

    /// Returns the imports that break a rule.
    pub(crate) fn check(&self) -> Vec<TidyFinding> {
        self.check_by(LAYERS).flat_map(|(_, findings, _)| findings).collect()
    }

    /// Returns findings and figures of each crate, by the layers in `table`.
    fn check_by<'a>(
        &'a self,
        table: &'a [(&'a str, &'a [&'a str])],
    ) -> impl Iterator<Item = (&'a str, Vec<TidyFinding>, LayerFigures)> {
        self.crates.iter().map(|(name, imports)| {
            let layers = table.iter().find(|(it, _)| it == name).map(|(_, layers)| *layers);
            let (findings, figures) =
                CrateLayers::new(imports, layers.unwrap_or_default()).check(name);
            (name.as_str(), findings, figures)
        })
    }
}

impl fmt::Display for ModuleLayers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            out,
            "| crate | modules | layers | imports | upward imports | modules in cycles |"
        )?;
        write!(out, "|---|---|---|---|---|---|")?;
        for (name, _, figures) in self.check_by(LAYERS) {
            let LayerFigures { modules, layers, imports, upward_imports, modules_in_cycles } =
                figures;
            write!(out, "\n| {name} | {modules} | {layers} | {imports} ")?;
            write!(out, "| {upward_imports} | {modules_in_cycles} |")?;
        }
        Ok(())
    }
}

/// Layers and imports of one crate.
struct CrateLayers<'a> {
    imports: &'a CrateImports,
    layers: &'a [&'a str],
    /// Imported modules of each module, with the files that import them.
    graph: BTreeMap<ModulePath, BTreeMap<ModulePath, Vec<&'a str>>>,
}

impl<'a> CrateLayers<'a> {
    fn new(imports: &'a CrateImports, layers: &'a [&'a str]) -> Self {
        let mut layers_of_crate = Self { imports, layers, graph: BTreeMap::new() };
        for path in &imports.modules {
            layers_of_crate.graph.entry(layers_of_crate.checked_module(path)).or_default();
        }
        for (from, to, location) in &imports.edges {
            let from = layers_of_crate.checked_module(from);
            let to = layers_of_crate.checked_module(to);
            // The crate root may import everything.
            if from != to && !from.is_empty() {
                let locations =
                    layers_of_crate.graph.entry(from).or_default().entry(to).or_default();
                locations.push(location);
            }
        }
        layers_of_crate
    }

    /// Returns the module of the graph that `path` belongs to: the first name, or the first two if the layer is a
    /// folder. The empty path is the crate root, to which items of no module belong.
    fn checked_module(&self, path: &[String]) -> ModulePath {
        let Some(first) = path.first() else { return Vec::new() };
        let is_folder = self.layers.iter().any(|it| it.strip_suffix('/') == Some(first));
        let module = path[..path.len().min(if is_folder { 2 } else { 1 })].to_vec();
        if self.imports.modules.contains(&module) {
            return module;
        }
        let folder = vec![first.clone()];
        if self.imports.modules.contains(&folder) { folder } else { Vec::new() }
    }

    /// Returns the index of a module's layer. The crate root is above all layers.
    fn layer(&self, module: &[String]) -> Option<usize> {
        let Some(first) = module.first() else { return Some(self.layers.len()) };
        let contains = |layer: &&str| {
            layer.split_whitespace().any(|it| it.strip_suffix('/').unwrap_or(it) == first)
        };
        self.layers.iter().position(contains)
    }

    /// Checks the imports of the crate, and counts them.
    fn check(&self, name: &str) -> (Vec<TidyFinding>, LayerFigures) {
        let mut findings = Vec::new();
        let imports = self.graph.values().map(BTreeMap::len).sum();
        let modules = self.graph.keys().filter(|it| !it.is_empty()).count();
        let mut figures =
            LayerFigures { modules, layers: self.layers.len(), imports, ..LayerFigures::default() };
        for module in self.graph.keys().filter(|it| self.layer(it).is_none()) {
            let module = module_name(module);
            let message = format!("{module} has no layer in LAYERS of xtask/src/tidy/layers.rs");
            findings.push(error(name, message));
        }
        for (from, to, location) in self.upward_imports() {
            figures.upward_imports += 1;
            findings.push(error(
                location,
                format!("{} imports {}, which is above it", module_name(from), module_name(to)),
            ));
        }
        // A cycle is a fault even if all its modules are in one layer.
        for cycle in self.cycles() {
            figures.modules_in_cycles += cycle.len();
            let names: Vec<String> = cycle.iter().map(|it| module_name(it)).collect();
            findings.push(error(
                name,
                format!("these modules import each other in a cycle: {}", names.join(", ")),
            ));
        }
        (findings, figures)
    }

    /// Returns the imports of a higher layer or of the crate root, each with the first file that has it.
    fn upward_imports(&self) -> impl Iterator<Item = (&ModulePath, &ModulePath, &str)> {
        let imports =
            self.graph.iter().flat_map(|(from, imports)| imports.iter().map(move |it| (from, it)));
        imports.filter_map(|(from, (to, locations))| {
            let is_up = to.is_empty() || self.layer(to) > self.layer(from);
            is_up.then(|| (from, to, locations[0]))
        })
    }

    /// Returns the groups of modules in which each imports all others, directly or indirectly.
    fn cycles(&self) -> Vec<BTreeSet<&ModulePath>> {
        let reachable: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
            self.graph.keys().map(|from| (from, self.reachable(from))).collect();
        let mut cycles = Vec::new();
        for (from, targets) in &reachable {
            let is_same_cycle =
                |it: &&&ModulePath| reachable.get(**it).is_some_and(|back| back.contains(from));
            let cycle: BTreeSet<&ModulePath> =
                targets.iter().filter(is_same_cycle).copied().collect();
            // Each cycle is found from all of its modules, and is listed for the first one only.
            if cycle.first() == Some(from) {
                cycles.push(cycle);
            }
        }
        cycles
    }

    /// Returns the modules that `from` imports, directly or indirectly.
    fn reachable<'b>(&'b self, from: &'b ModulePath) -> BTreeSet<&'b ModulePath> {
        let mut reachable = BTreeSet::new();
        let mut unvisited = vec![from];
        while let Some(next) = unvisited.pop() {
            for to in self.graph.get(next).into_iter().flat_map(BTreeMap::keys) {
                if reachable.insert(to) {
                    unvisited.push(to);
                }
            }
        }
        reachable
    }
}

fn module_name(path: &[String]) -> String {
    if path.is_empty() { ROOT.to_owned() } else { format!("`{}`", path.join("::")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns findings and figures of a crate with these files, by its layers, the lowest first.
    fn check(files: &[(&str, &str)], layers: &[&str]) -> (Vec<String>, LayerFigures) {
        let mut all = ModuleLayers::default();
        for (path, text) in files {
            let path = format!("a/src/{path}");
            assert_eq!(all.add_file(&SourceFile { krate: "a", path: &path, text }), None);
        }
        let table = [("a", layers)];
        let (_, findings, figures) = all.check_by(&table).next().unwrap();
        (findings.into_iter().map(|it| it.message).collect(), figures)
    }

    #[test]
    fn an_import_of_a_higher_layer_is_an_error_in_every_form() {
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
            let (messages, figures) = check(&files, &["low", "top"]);
            assert_eq!(messages[0], "`low` imports `top`, which is above it", "{form}");
            assert_eq!((figures.upward_imports, figures.modules_in_cycles), (1, 2), "{form}");
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
        let figures = LayerFigures {
            modules: 2,
            layers: 2,
            imports: 1,
            upward_imports: 0,
            modules_in_cycles: 0,
        };
        assert_eq!(check(&files, &["low", "top"]), (Vec::new(), figures));
    }

    #[test]
    fn no_module_imports_from_the_crate_root() {
        let (messages, _) = check(&[("lib.rs", ""), ("low.rs", "use crate::lock;")], &["low"]);
        assert_eq!(messages, ["`low` imports the crate root, which is above it"]);
    }

    #[test]
    fn modules_of_a_folder_form_no_cycle() {
        let files = [
            ("lib.rs", ""),
            ("model.rs", "pub(crate) mod b;"),
            ("model/b.rs", "use super::c::X;"),
            ("model/c.rs", "use crate::model::b::X;"),
            ("top.rs", "use crate::model::c::X;"),
        ];
        let (messages, figures) = check(&files, &["model/", "top"]);
        assert_eq!(
            messages,
            ["these modules import each other in a cycle: `model::b`, `model::c`"]
        );
        assert_eq!((figures.modules_in_cycles, figures.upward_imports), (2, 0));
    }

    #[test]
    fn a_module_without_a_layer_is_an_error() {
        let files = [("lib.rs", ""), ("low.rs", ""), ("new.rs", "")];
        let (messages, _) = check(&files, &["low"]);
        assert_eq!(messages, ["`new` has no layer in LAYERS of xtask/src/tidy/layers.rs"]);
    }
}
