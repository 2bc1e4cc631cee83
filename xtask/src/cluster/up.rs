//! Shell: start of a cluster: a new one, an unfinished one of a killed `up`, or one that a fault broke.

use std::{
    collections::BTreeSet,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;

use super::{
    ClusterPaths, KubeProxyMode, KubernetesVersion, cgroups, fault,
    go_toolchain::GoToolchain,
    images::{self, ImageArchives},
    kubectl::{self, RegisteredNode},
    network, pki,
    plan::{self, ClusterProcess, ClusterUpStep, MAX_NODES, ObservedCluster},
    process::{self, ProcessIdentity},
    programs::{self, ClusterPrograms},
    start::ClusterStarter,
    state::ClusterRecord,
    with_existing_cluster,
};
use crate::{
    lock,
    setup::{self, SetupPurpose},
    sh, toolchain,
    workspace::CargoWorkspace,
};

/// Properties of the cluster to start.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ClusterUpArgs {
    /// Number of nodes; 0 is an API server alone [default: 2, or the present number]
    #[arg(long, value_parser = clap::value_parser!(u8).range(0..=i64::from(MAX_NODES)))]
    pub(crate) nodes: Option<u8>,
    /// Version of Kubernetes: newest, oldest or vX.Y.Z [default: the version in KUBEBUILDER_ASSETS, or newest]
    #[arg(long)]
    pub(crate) kubernetes: Option<KubernetesVersion>,
    /// Mode in which kube-proxy translates addresses of Services [default: iptables]
    #[arg(long, value_enum)]
    pub(crate) proxy: Option<KubeProxyMode>,
    /// Packages whose images the nodes get; all when none is named
    #[arg(long = "image", value_name = "PACKAGE")]
    pub(crate) images: Vec<String>,
    /// Write a description of the cluster to FILE as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Install what is missing without asking
    #[arg(long)]
    pub(crate) yes: bool,
    /// Image archives that were built before the step that needs root
    #[arg(long, hide = true)]
    prepared: Option<PathBuf>,
    /// Process of the test run that a new cluster belongs to: `sweep` removes the cluster after that process
    #[arg(long, hide = true, value_name = "PID")]
    owner: Option<u32>,
}

/// Runs `cargo xtask cluster up`: builds as the user, then starts processes as root.
pub(crate) fn run(paths: &ClusterPaths, args: &ClusterUpArgs) -> Result<()> {
    if let Some(file) = &args.prepared {
        return start_cluster(paths, args, requested_version(paths, args)?, &read_images(file)?);
    }
    let images = prepare(paths, args)?;
    if sh::is_root() {
        return start_cluster(paths, args, requested_version(paths, args)?, &images);
    }
    rerun_as_root(&images)
}

/// Builds all programs and images, without root. It is also `cargo xtask cluster build`.
pub(crate) fn prepare(paths: &ClusterPaths, args: &ClusterUpArgs) -> Result<ImageArchives> {
    let version = requested_version(paths, args)?;
    setup::prepare(&[SetupPurpose::Build, SetupPurpose::Cluster], args.yes)?;
    let assets = programs::assets(version)?;
    build_programs(version, assets.as_deref())?;
    let programs = ClusterPrograms::find(version, assets.as_deref())?;
    match args.nodes {
        Some(0) => Ok(ImageArchives::new()),
        _ => build_images(&programs, &args.images),
    }
}

/// Runs `cargo xtask cluster load`: builds images and imports them into all nodes.
pub(crate) fn load_images(
    paths: &ClusterPaths,
    packages: &[String],
    prepared: Option<&Path>,
) -> Result<()> {
    let record = paths.require_record()?;
    let version: KubernetesVersion = record.kubernetes.parse().map_err(anyhow::Error::msg)?;
    let images = match prepared {
        Some(file) => read_images(file)?,
        None => build_images(&ClusterPrograms::find(version, record.assets.as_deref())?, packages)?,
    };
    // Only the import needs root. The images are built before, as the user.
    if !sh::is_root() {
        return rerun_as_root(&images);
    }
    with_existing_cluster(paths, |starter| {
        for node in 1..=record.nodes {
            images::import(starter, node, &images)?;
        }
        println!(
            "cluster {}: {} images in each of {} nodes",
            paths.name,
            images.len(),
            record.nodes
        );
        Ok(())
    })
}

/// Runs `cargo xtask cluster import`: makes an image of a static program, and imports it into all nodes under each of
/// these names.
pub(crate) fn import_program(paths: &ClusterPaths, program: &Path, names: &[String]) -> Result<()> {
    with_existing_cluster(paths, |starter| {
        let destination = paths.folder().join("imports");
        for name in names {
            let archive = images::build_foreign_archive(program, name, &destination)?;
            let images = ImageArchives::from([(name.clone(), archive)]);
            for node in 1..=starter.record.nodes {
                images::import(starter, node, &images)?;
            }
            println!("cluster {}: {name} in each of {} nodes", paths.name, starter.record.nodes);
        }
        Ok(())
    })
}

/// Version to run: the named one, else the existing cluster's, else the default.
fn requested_version(paths: &ClusterPaths, args: &ClusterUpArgs) -> Result<KubernetesVersion> {
    let running = paths.read_record()?.map(|record| record.kubernetes.parse::<KubernetesVersion>());
    match (args.kubernetes, running) {
        (Some(version), _) => Ok(version),
        (None, Some(running)) => running.map_err(anyhow::Error::msg),
        (None, None) => programs::default_version(),
    }
}

fn build_programs(version: KubernetesVersion, assets: Option<&Path>) -> Result<()> {
    let _lock = lock::acquire(&toolchain::cache_directory()?.join("cluster.lock"))?;
    let missing = programs::missing(version, assets)?;
    if missing.is_empty() {
        return Ok(());
    }
    let toolchain = GoToolchain::find()?;
    println!("The cluster's programs are built once, from their Go modules:");
    let mut seconds: u32 = missing.iter().map(|recipe| recipe.seconds).sum();
    for (number, recipe) in missing.iter().enumerate() {
        let (position, total) = (number + 1, missing.len());
        let (name, version) = (recipe.name, &recipe.version);
        let minutes = seconds.div_ceil(60);
        println!("[{position}/{total}] build {name} {version} (about {minutes} min left)");
        programs::build(recipe, &toolchain)?;
        seconds -= recipe.seconds;
    }
    // The programs are in the cache; the compiled packages are no longer needed.
    toolchain.delete_build_cache();
    Ok(())
}

fn build_images(programs: &ClusterPrograms, packages: &[String]) -> Result<ImageArchives> {
    let workspace = CargoWorkspace::load()?;
    let to = workspace.target.join("cluster-images");
    images::build_archives(&workspace, programs, packages, &to)
}

fn read_images(file: &Path) -> Result<ImageArchives> {
    let text = fs::read_to_string(file).with_context(|| format!("no {}", file.display()))?;
    Ok(serde_json::from_str(&text)?)
}

/// Runs this command again through sudo, with the images that were built as the user.
fn rerun_as_root(images: &ImageArchives) -> Result<()> {
    let folder = CargoWorkspace::load()?.target.join("cluster-images");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // Images are built before, as the user; root gets their paths in a file. Another cluster with other images may start
    // at the same time, so the file is this process's own.
    let file = folder.join(format!("images-{}.json", std::process::id()));
    fs::write(&file, serde_json::to_string(images)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    let assets = std::env::var_os("KUBEBUILDER_ASSETS");
    let vars: Vec<_> =
        assets.iter().map(|value| ("KUBEBUILDER_ASSETS", value.as_os_str())).collect();
    let mut command = sh::root_command_with(std::env::current_exe()?, &vars);
    let result = sh::run(command.args(std::env::args_os().skip(1)).arg("--prepared").arg(&file));
    let _removed = fs::remove_file(&file);
    result
}

/// Starts everything that needs root.
fn start_cluster(
    paths: &ClusterPaths,
    args: &ClusterUpArgs,
    version: KubernetesVersion,
    images: &ImageArchives,
) -> Result<()> {
    let record = updated_record(paths, args, version)?;
    paths.write_record(&record)?;
    // Only now: the lock file is in the cluster's directory, which `write_record` creates.
    let _lock = lock::acquire(&paths.folder().join("lock"))?;
    let programs = ClusterPrograms::find(version, record.assets.as_deref())?;
    let starter = ClusterStarter { paths, record: &record, programs: &programs };
    undo_faults(paths, &record);
    let steps = plan::plan(&observe_cluster(&starter, images), record.nodes);
    let mut stale_nodes: Option<Vec<RegisteredNode>> = None;
    let started = Instant::now();
    let mut seconds: u32 = steps.iter().map(|step| step.expected_seconds()).sum();
    for (number, step) in steps.iter().enumerate() {
        println!("[{:>2}/{}] {step} (about {seconds} s left)", number + 1, steps.len());
        // Read before the first start of a kubelet: afterwards a heartbeat of the old kubelet would look like one of the
        // new kubelet. Earlier the API server may not respond, and no node would be known.
        let is_kubelet = matches!(step, ClusterUpStep::StartProcess(ClusterProcess::Kubelet(_)));
        if is_kubelet && stale_nodes.is_none() {
            let mut nodes = starter.nodes()?;
            nodes.retain(|node| steps.iter().any(|it| starts_kubelet(*it, &node.name)));
            stale_nodes = Some(nodes);
        }
        run_step(*step, &starter, images, stale_nodes.as_deref().unwrap_or_default())?;
        seconds -= step.expected_seconds();
    }
    println!("cluster {}: up after {} s\n", paths.name, started.elapsed().as_secs());
    print_summary(&starter, args.json.as_deref())
}

/// Record of the cluster after this `up`. Refuses changes that need another cluster.
fn updated_record(
    paths: &ClusterPaths,
    args: &ClusterUpArgs,
    version: KubernetesVersion,
) -> Result<ClusterRecord> {
    let Some(old) = paths.read_record()? else {
        // A port that is free now. Another program may take it before the forwarder starts, which then reports it.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let proxy = args.proxy.unwrap_or(KubeProxyMode::Iptables);
        let record = ClusterRecord::new(version.to_string(), args.nodes.unwrap_or(2), proxy, port);
        let owner = args.owner.and_then(ProcessIdentity::of);
        return Ok(record.with_assets(programs::assets(version)?).with_owner(owner));
    };
    let name = &paths.name;
    if let (Some(pid), Some(owner)) = (args.owner, old.owner.filter(|it| it.is_running()))
        && owner.pid != pid
    {
        bail!("cluster {name} belongs to the test run of process {}: wait for its end", owner.pid);
    }
    // etcd holds what another version may not read.
    if old.kubernetes != version.to_string() {
        bail!("cluster {name} runs {}: run `cargo xtask cluster down` first", old.kubernetes);
    }
    if args.proxy.is_some_and(|proxy| proxy.name() != old.proxy) {
        bail!(
            "cluster {name} has kube-proxy in mode {}: run `cargo xtask cluster down` first",
            old.proxy
        );
    }
    let nodes = args.nodes.unwrap_or(old.nodes);
    if nodes < old.nodes {
        bail!("cluster {name} has {} nodes: run `cargo xtask cluster down` first", old.nodes);
    }
    Ok(old.with_nodes(nodes))
}

/// Continues suspended processes, and connects nodes that were cut off.
fn undo_faults(paths: &ClusterPaths, record: &ClusterRecord) {
    for node in 1..=record.nodes {
        let _not_there = fault::set_frozen(paths, node, false);
        if paths.netns(Some(node)).exists() {
            let _not_there = network::set_disconnected(paths, node, false);
        }
    }
    // A suspended process counts as alive for the plan, and nothing would continue it.
    for process in all_processes(record.nodes) {
        if process::pid_of(paths, process).is_some_and(process::is_stopped) {
            let _gone = process::signal(paths, process, Signal::SIGCONT);
        }
    }
}

fn all_processes(nodes: u8) -> impl Iterator<Item = ClusterProcess> {
    let control = [
        ClusterProcess::Etcd,
        ClusterProcess::ApiServer,
        ClusterProcess::ControllerManager,
        ClusterProcess::Scheduler,
        ClusterProcess::Forward,
    ];
    control.into_iter().chain((1..=nodes).flat_map(ClusterProcess::node_processes))
}

fn observe_cluster(starter: &ClusterStarter<'_>, images: &ImageArchives) -> ObservedCluster {
    let paths = starter.paths;
    let running: BTreeSet<ClusterProcess> = all_processes(starter.record.nodes)
        .filter(|&running_process| process::pid_of(paths, running_process).is_some())
        .collect();
    let nodes = 1..=starter.record.nodes;
    ObservedCluster {
        nodes_with_images: nodes.filter(|&node| images::is_loaded(paths, node, images)).collect(),
        has_base: paths.folder().join("laid").exists() && network::exists(paths),
        has_addons: running.contains(&ClusterProcess::ApiServer) && starter.has_addons(),
        running,
    }
}

fn starts_kubelet(step: ClusterUpStep, name: &str) -> bool {
    matches!(step, ClusterUpStep::StartProcess(ClusterProcess::Kubelet(node)) if name == format!("node{node}"))
}

fn run_step(
    step: ClusterUpStep,
    starter: &ClusterStarter<'_>,
    images: &ImageArchives,
    stale_nodes: &[RegisteredNode],
) -> Result<()> {
    match step {
        ClusterUpStep::CreateBase => create_base(starter),
        ClusterUpStep::StartProcess(process) => {
            starter.start(process)?;
            match process {
                ClusterProcess::Node(_) => set_routes(starter),
                // Only a new namespace lacks routes.
                _ => Ok(()),
            }
        }
        ClusterUpStep::WaitForApiServer => starter.wait_for_api_server(),
        ClusterUpStep::ImportImages(node) => images::import(starter, node, images),
        ClusterUpStep::ApplyAddons => starter.apply_addons(),
        ClusterUpStep::WaitUntilReady => starter.wait_until_ready(stale_nodes),
    }
}

/// Creates the base of the control plane. Existing keys stay, because kubelets and pods trust them.
fn create_base(starter: &ClusterStarter<'_>) -> Result<()> {
    let paths = starter.paths;
    let (cluster, clients) = (paths.cgroup(), format!("{}/clients", paths.cgroup()));
    cgroups::create(&format!("{cluster}/hub"))?;
    // Clients of tests enter it, which would otherwise compete with the whole cluster.
    cgroups::create(&clients)?;
    cgroups::set_cpu_weight(&cluster, cgroups::CLUSTER_CPU_PERCENT)?;
    cgroups::set_cpu_weight(&clients, cgroups::CLIENTS_CPU_PERCENT)?;
    network::create_namespace(paths, None)?;
    // Written last: without this file the base is incomplete, left by a killed `up`.
    let laid = paths.folder().join("laid");
    if !laid.exists() {
        pki::write(&paths.pki())?;
        starter.write_kubeconfig()?;
    }
    fs::write(&laid, "").with_context(|| format!("cannot write {}", laid.display()))
}

/// Sets routes between the nodes that have a namespace by now.
pub(crate) fn set_routes(starter: &ClusterStarter<'_>) -> Result<()> {
    let paths = starter.paths;
    let nodes = (1..=starter.record.nodes).take_while(|&node| paths.netns(Some(node)).exists());
    network::set_routes(paths, nodes.last().unwrap_or(0))
}

/// Prints the nodes and the commands that users may need next.
fn print_summary(starter: &ClusterStarter<'_>, json: Option<&Path>) -> Result<()> {
    let paths = starter.paths;
    let described = kubectl::describe_cluster(starter)?;
    if let Some(file) = json {
        fs::write(file, serde_json::to_string_pretty(&described)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    if starter.record.nodes > 0 {
        println!("node     ready  version    address        pods");
    }
    for node in described["nodes"].as_array().into_iter().flatten() {
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        let ready = if node["ready"] == true { "yes" } else { "NO" };
        let (name, version) = (text(&node["name"]), text(&node["version"]));
        let (address, pods) = (text(&node["addresses"][0]), text(&node["pods"][0]));
        println!("{name:<8} {ready:<6} {version:<10} {address:<14} {pods}");
    }
    // Printed commands must work as they are, so another name than the default is part of them.
    let name = match paths.name.as_str() {
        "rouse" => String::new(),
        other => format!("--name {other} "),
    };
    let (kubectl, config) = (starter.programs.file("kubectl")?, paths.kubeconfig());
    println!(
        "\nfrom this machine      {} --kubeconfig {} get nodes",
        kubectl.display(),
        config.display()
    );
    println!("inside the network     cargo xtask cluster {name}run -- kubectl get pods -A");
    if starter.record.nodes > 0 {
        println!("on a node              cargo xtask cluster {name}run --node 1 -- ip address");
    }
    println!("remove it              cargo xtask cluster {name}down");
    Ok(())
}
