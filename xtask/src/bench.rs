//! Shell: measurements of Rouse beside its controls, in interleaved rounds, written to BENCHMARKS.md.

mod case_results;
mod case_selection;
mod cluster_burst;
mod cluster_context;
mod cluster_wake;
mod clusterip;
mod clusterip_cluster;
mod cold_start_stages;
mod connect;
mod control_plane;
mod count;
mod ebpf_run_time;
mod fanout;
mod footprint;
mod gateway;
mod grow;
mod idle;
mod node_context;
mod object_watch;
mod plain_deployment;
mod process_memory;
mod report;
mod resync;
mod scale_in;
mod standby;
mod stats;
mod wake;
mod warm;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use self::{
    case_selection::CaseSelection,
    cluster_context::ClusterBenchContext,
    clusterip::ClusterIpBenchContext,
    gateway::{GatewayBenchArgs, GatewayBenchContext},
    node_context::NodeBenchContext,
    report::{BenchReport, BenchRow},
    stats::RoundValues,
};
use crate::{
    build::{self, BuildProfile},
    build_ebpf, cluster, image,
    machine::MachineInfo,
    setup::{self, SetupPurpose},
    sh,
    workspace::CargoWorkspace,
};

/// Arguments of the command `cargo xtask bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// Benches to run; all when none is named: wake, grow, connect, warm, idle, control-plane, cluster-wake,
    /// cluster-burst, footprint, scale-in, standby, resync, fanout, count, clusterip, clusterip-cluster, gateway
    names: Vec<String>,
    /// Cases of the one named bench, joined by commas; all if none is named. Only of standby, clusterip,
    /// clusterip-cluster and gateway
    #[arg(long, value_delimiter = ',', value_name = "CASE")]
    cases: Vec<String>,
    /// Rounds of each comparison
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write the figures to FILE as JSON, one array element a bench
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Install what is missing without asking
    #[arg(long)]
    yes: bool,
    /// Leave BENCHMARKS.md as it is
    #[arg(long)]
    dry: bool,
    /// Measure the program FILE instead of building one
    #[arg(long, value_name = "FILE")]
    rouse: Option<PathBuf>,
    /// Image archives for `cluster up`, instead of images that it builds; needs --rouse
    #[arg(long, value_name = "FILE", hide = true, requires = "rouse")]
    prepared: Option<PathBuf>,
    /// Send requests with the program FILE instead of building one
    #[arg(long, value_name = "FILE", hide = true)]
    client: Option<PathBuf>,
    /// Name of the clusters, which are created for the run and removed after it
    #[arg(long, default_value = "bench")]
    cluster: String,
    #[command(flatten)]
    gateway: GatewayBenchArgs,
}

impl BenchArgs {
    /// Returns the program to measure, which is built if the options name none.
    fn rouse_program(&self, workspace: &CargoWorkspace) -> Result<PathBuf> {
        let build = || build::build_rouse(workspace, BuildProfile::Release);
        self.rouse.clone().map_or_else(build, Ok)
    }

    /// Returns the program that sends requests, which is built if the options name none.
    fn client_program(&self, workspace: &CargoWorkspace) -> Result<PathBuf> {
        self.client.clone().map_or_else(|| build::build_client(workspace), Ok)
    }
}

/// Name of a bench and the function that measures its rows.
type NamedBench = (&'static str, BenchRunner);

/// Environment that a bench needs, with the function that measures in it.
#[derive(Clone, Copy, Debug)]
enum BenchRunner {
    /// A local node, started by `rouse up`.
    Node(fn(&NodeBenchContext) -> Result<Vec<BenchRow>>),
    /// A real Kubernetes cluster of xtask, with Rouse installed.
    Cluster(fn(&ClusterBenchContext) -> Result<Vec<BenchRow>>),
    /// Both of them, one after the other.
    NodeAndCluster(fn(&NodeBenchContext, &ClusterBenchContext) -> Result<Vec<BenchRow>>),
    /// The eBPF programs alone, between namespaces and cgroups that the bench creates.
    Kernel(fn(&EbpfBenchContext) -> Result<Vec<BenchRow>>),
    /// Service proxies, on nodes that the bench creates.
    Proxies(fn(&ClusterIpBenchContext) -> Result<Vec<BenchRow>>),
    /// The activator and other gateways, in a network namespace that the bench creates.
    Gateways(fn(&GatewayBenchContext) -> Result<Vec<BenchRow>>),
    /// No environment but the programs that the bench builds.
    Standalone(fn() -> Result<Vec<BenchRow>>),
}

/// Object file of the eBPF programs, and the number of rounds to measure.
#[derive(Debug)]
struct EbpfBenchContext {
    object: PathBuf,
    rounds: u32,
}

const BENCHES: [NamedBench; 17] = [
    ("wake", BenchRunner::Node(wake::run)),
    ("grow", BenchRunner::Node(grow::run)),
    ("connect", BenchRunner::Node(connect::run)),
    ("warm", BenchRunner::Node(warm::run)),
    ("idle", BenchRunner::Node(idle::run)),
    ("control-plane", BenchRunner::Cluster(control_plane::run)),
    ("cluster-wake", BenchRunner::Cluster(cluster_wake::run)),
    ("cluster-burst", BenchRunner::Cluster(cluster_burst::run)),
    ("footprint", BenchRunner::Cluster(footprint::run)),
    ("scale-in", BenchRunner::Cluster(scale_in::run)),
    ("standby", BenchRunner::NodeAndCluster(standby::run)),
    ("resync", BenchRunner::Standalone(resync::run)),
    ("fanout", BenchRunner::Standalone(fanout::run)),
    ("count", BenchRunner::Kernel(count::run)),
    ("clusterip", BenchRunner::Proxies(clusterip::run)),
    ("clusterip-cluster", BenchRunner::Cluster(clusterip_cluster::run)),
    ("gateway", BenchRunner::Gateways(gateway::run)),
];

/// Runs `cargo xtask bench`: the benches that the arguments name, or all of them.
pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    let workspace = CargoWorkspace::load()?;
    let benches = select_benches(&args.names)?;
    let names: Vec<&str> = benches.iter().map(|(name, _)| *name).collect();
    // All refusals come before the builds, which take minutes.
    let cases = CaseSelection::new(&args.cases, &names)?;
    args.gateway.check(names.contains(&"gateway"))?;
    if !sh::is_root() {
        bail!(
            "the benches read the kernel's statistics: run them as root, for example with sudo -E"
        );
    }
    let folder = workspace.target.join("bench");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let environments = BenchEnvironments::build(args, &cases, &workspace, &folder, &benches)?;

    let (mut reports, mut failed) = (Vec::new(), Vec::new());
    for (name, body) in benches {
        println!("\n== {name} ==");
        match environments.run(body) {
            Ok(rows) => {
                let report = BenchReport::new(name, MachineInfo::read(), rows);
                println!("{}", report::markdown_section(&report));
                // After each bench, so that a run that is stopped keeps what it has measured.
                fs::write(folder.join(format!("{name}.json")), to_json(&report)?)?;
                reports.push(report);
            }
            // A failed bench does not stop the others: a whole run takes hours.
            Err(error) => {
                eprintln!("{name}: {error:#}");
                failed.push(name);
            }
        }
    }
    // Sections of benches that succeeded are written although another one failed.
    write_reports(args, &workspace, &reports)?;
    if !failed.is_empty() {
        bail!("not measured: {}", failed.join(", "));
    }
    Ok(())
}

/// Environments of the chosen benches.
#[derive(Debug)]
struct BenchEnvironments {
    node: Option<NodeBenchContext>,
    cluster: Option<ClusterBenchContext>,
    ebpf: Option<EbpfBenchContext>,
    proxies: Option<ClusterIpBenchContext>,
    gateways: Option<GatewayBenchContext>,
}

impl BenchEnvironments {
    /// Builds what `benches` need, and nothing else: a cluster takes minutes.
    fn build(
        args: &BenchArgs,
        cases: &CaseSelection,
        workspace: &CargoWorkspace,
        folder: &Path,
        benches: &[NamedBench],
    ) -> Result<Self> {
        let any = |is_kind: fn(&BenchRunner) -> bool| benches.iter().any(|(_, it)| is_kind(it));
        let on_node = any(|it| matches!(it, BenchRunner::Node(_) | BenchRunner::NodeAndCluster(_)));
        let on_cluster =
            any(|it| matches!(it, BenchRunner::Cluster(_) | BenchRunner::NodeAndCluster(_)));
        let on_kernel = any(|it| matches!(it, BenchRunner::Kernel(_)));
        let on_proxies = any(|it| matches!(it, BenchRunner::Proxies(_)));
        let on_gateways = any(|it| matches!(it, BenchRunner::Gateways(_)));
        Ok(Self {
            node: on_node.then(|| build_node_context(args, workspace, folder)).transpose()?,
            cluster: on_cluster
                .then(|| build_cluster_context(args, cases, workspace, folder))
                .transpose()?,
            ebpf: on_kernel.then(|| build_ebpf_context(args, workspace)).transpose()?,
            proxies: on_proxies
                .then(|| build_clusterip_context(args, cases, workspace, folder))
                .transpose()?,
            gateways: on_gateways
                .then(|| GatewayBenchContext::build(args, cases, workspace))
                .transpose()?,
        })
    }

    /// Runs a bench in its environment.
    fn run(&self, runner: BenchRunner) -> Result<Vec<BenchRow>> {
        const MISSING: &str = "the bench has no environment";
        match runner {
            BenchRunner::Node(run) => run(self.node.as_ref().context(MISSING)?),
            BenchRunner::Cluster(run) => run(self.cluster.as_ref().context(MISSING)?),
            BenchRunner::NodeAndCluster(run) => {
                run(self.node.as_ref().context(MISSING)?, self.cluster.as_ref().context(MISSING)?)
            }
            BenchRunner::Kernel(run) => run(self.ebpf.as_ref().context(MISSING)?),
            BenchRunner::Proxies(run) => run(self.proxies.as_ref().context(MISSING)?),
            BenchRunner::Gateways(run) => run(self.gateways.as_ref().context(MISSING)?),
            BenchRunner::Standalone(run) => run(),
        }
    }
}

/// Manifest of a Service of the sample application, with annotations below `autoscaling.knative.dev`.
fn service_manifest(name: &str, scaling: &[(&str, &str)]) -> String {
    let line = |(key, value): &(&str, &str)| {
        format!("        autoscaling.knative.dev/{key}: \"{value}\"\n")
    };
    let scaling: String = scaling.iter().map(line).collect();
    format!(
        "---
apiVersion: serving.knative.dev/v1
kind: Service
metadata: {{ name: {name}, namespace: default }}
spec:
  template:
    metadata:
      annotations:
{scaling}    spec:
      containers: [{{ image: \"dev.local/hello:v1\", ports: [{{ containerPort: 8080 }}] }}]
"
    )
}

/// Returns true if the condition named `condition` has status `True` on the object.
fn is_condition_true(object: &Value, condition: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|one| one["type"] == condition && one["status"] == "True")
}

/// Builds the programs and images that the benches of the local node need.
fn build_node_context(
    args: &BenchArgs,
    workspace: &CargoWorkspace,
    folder: &Path,
) -> Result<NodeBenchContext> {
    setup::prepare(&[SetupPurpose::Build, SetupPurpose::Node, SetupPurpose::Bench], args.yes)?;
    // The node starts pods from these OCI layouts: there is no registry to pull from.
    let images = workspace.target.join("images");
    image::write_layouts(workspace, &["hello"], &images)?;
    let client = build::build_client(workspace)?;
    let hello = image::program_path(workspace, "hello");
    Ok(NodeBenchContext {
        rouse: args.rouse_program(workspace)?,
        images,
        client,
        hello,
        folder: folder.to_owned(),
        rounds: args.rounds,
    })
}

/// Builds the object that the benches of the eBPF programs need.
fn build_ebpf_context(args: &BenchArgs, workspace: &CargoWorkspace) -> Result<EbpfBenchContext> {
    setup::prepare(&[SetupPurpose::Build, SetupPurpose::Kernel, SetupPurpose::Bench], args.yes)?;
    Ok(EbpfBenchContext { object: build_ebpf::build_object(workspace)?, rounds: args.rounds })
}

/// Builds the programs and images that the benches on clusters need.
fn build_cluster_context(
    args: &BenchArgs,
    cases: &CaseSelection,
    workspace: &CargoWorkspace,
    folder: &Path,
) -> Result<ClusterBenchContext> {
    setup::prepare(&[SetupPurpose::Build, SetupPurpose::Kernel, SetupPurpose::Cluster], args.yes)?;
    let prepared = args.rouse.clone().zip(args.prepared.clone());
    // Prepared programs are in images already.
    if prepared.is_none() {
        image::write_layouts(workspace, &["hello", "rouse"], &workspace.target.join("images"))?;
    }
    Ok(ClusterBenchContext {
        prepared,
        name: args.cluster.clone(),
        client: args.client_program(workspace)?,
        folder: folder.to_owned(),
        cases: cases.clone(),
        rounds: args.rounds,
    })
}

/// Builds the programs that the bench of service proxies needs.
fn build_clusterip_context(
    args: &BenchArgs,
    cases: &CaseSelection,
    workspace: &CargoWorkspace,
    folder: &Path,
) -> Result<ClusterIpBenchContext> {
    let purposes =
        [SetupPurpose::Build, SetupPurpose::Kernel, SetupPurpose::Cluster, SetupPurpose::Bench];
    setup::prepare(&purposes, args.yes)?;
    Ok(ClusterIpBenchContext {
        rouse: args.rouse_program(workspace)?,
        client: args.client_program(workspace)?,
        kube_proxy: cluster::kube_proxy()?,
        folder: folder.to_owned(),
        cases: cases.clone(),
        rounds: args.rounds,
    })
}

fn select_benches(names: &[String]) -> Result<Vec<NamedBench>> {
    if names.is_empty() {
        return Ok(BENCHES.to_vec());
    }
    let find = |name: &String| {
        BENCHES.iter().find(|(known_name, _)| known_name == name).copied().with_context(|| {
            let names: Vec<&str> = BENCHES.iter().map(|(name, _)| *name).collect();
            format!("there is no bench `{name}`; there are {}", names.join(", "))
        })
    };
    names.iter().map(find).collect()
}

fn write_reports(
    args: &BenchArgs,
    workspace: &CargoWorkspace,
    reports: &[BenchReport],
) -> Result<()> {
    if let Some(file) = &args.json {
        fs::write(file, to_json(&reports)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if args.dry || reports.is_empty() {
        return Ok(());
    }
    let file = workspace.root.join("BENCHMARKS.md");
    // Sections of benches that did not run stay as they are.
    let mut document = fs::read_to_string(&file).unwrap_or_else(|_| "# Benchmarks\n".into());
    for report in reports {
        let section = report::markdown_section(report);
        document = report::replace_section(&document, &report.name, &section);
    }
    fs::write(&file, document).with_context(|| format!("cannot write {}", file.display()))
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Measures every subject once in each round, and rotates which subject comes first.
///
/// A round before the first one warms the caches; its values are dropped.
fn interleave(
    rounds: u32,
    subjects: &[&'static str],
    mut measure: impl FnMut(&'static str) -> Result<f64>,
) -> Result<RoundValues> {
    let mut values = RoundValues::new();
    for round in 0..=rounds as usize {
        // Rotation keeps a drift within rounds, such as a warming processor, from favouring one subject.
        for offset in 0..subjects.len() {
            let subject = subjects[(offset + round) % subjects.len()];
            let value = measure(subject).with_context(|| format!("subject {subject}"))?;
            if round > 0 {
                values.entry(subject).or_default().push(value);
            }
        }
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_rotate_who_comes_first_and_drop_the_first_round() {
        let mut order = Vec::new();
        let mut next = 0.0;
        let rounds = interleave(2, &["a", "b"], |subject| {
            order.push(subject);
            next += 1.0;
            Ok(next)
        });
        assert_eq!(order, ["a", "b", "b", "a", "a", "b"]);
        let expected = RoundValues::from([("a", vec![4.0, 5.0]), ("b", vec![3.0, 6.0])]);
        assert_eq!(rounds.unwrap(), expected);
    }

    #[test]
    fn a_bench_that_does_not_exist_is_refused_with_those_that_do() {
        let error = select_benches(&["wakes".into()]).unwrap_err().to_string();
        let names: Vec<_> = BENCHES.iter().map(|(name, _)| *name).collect();
        assert_eq!(error, format!("there is no bench `wakes`; there are {}", names.join(", ")));
        assert!(names.contains(&"wake") && names.contains(&"scale-in"), "{names:?}");
    }

    #[test]
    fn the_help_names_every_bench() {
        let command = <BenchArgs as clap::Args>::augment_args(clap::Command::new("bench"));
        let names = command.get_arguments().find(|argument| argument.get_id() == "names").unwrap();
        let help = names.get_help().unwrap().to_string();
        for (name, _) in &BENCHES {
            assert!(help.contains(name), "{name} is not in: {help}");
        }
    }
}
