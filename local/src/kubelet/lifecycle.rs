//! Shell: steps that create a pod, start its containers, and remove it.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::local_node::LocalPodSpec;
use k8s_openapi::api::core::v1::Volume;
use thiserror::Error as ThisError;
use tracing::{info, warn};

use super::{EventResource, KubeletResources, PreparedPod, exits};
use crate::addresses::PodAddress;
use crate::bundle::{self, BundleContext, BundleError};
use crate::cgroups::{CgroupError, ContainerCgroup};
use crate::container_log;
use crate::images::UnpackedImage;
use crate::layout::DNS_ADDRESS;
use crate::net;
use crate::pods::PodEvent;
use crate::runtime::{ContainerLaunch, LaunchedContainer, OciRuntimeError};

mod sub_paths;

/// Failure of a container's start.
#[derive(Debug, ThisError)]
pub(super) enum ContainerStartError {
    #[error("cannot form the container")]
    Bundle(#[from] BundleError),
    #[error("cannot set up the container's cgroup")]
    Cgroup(#[from] CgroupError),
    #[error("cannot join the pod's network")]
    Network(#[from] net::NetError),
    #[error("cannot run the container")]
    Runtime(#[from] OciRuntimeError),
    #[error("cannot write {path}")]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl ContainerStartError {
    /// Returns Kubernetes' reason for a container that waits.
    fn reason(&self) -> &'static str {
        match self {
            Self::Bundle(_) => "CreateContainerConfigError",
            Self::Cgroup(_) | Self::Network(_) | Self::File { .. } => "CreateContainerError",
            Self::Runtime(_) => "RunContainerError",
        }
    }
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> ContainerStartError {
    let path = path.to_owned();
    move |source| ContainerStartError::File { path, source }
}

/// Formats an error and its causes in one line.
pub(super) fn error_chain(error: &dyn Error) -> String {
    common::link::error_chain(error).replace('\n', " ")
}

/// Parameters of one start, in addition to the pod spec.
#[derive(Debug)]
pub(super) struct ContainerStartRequest {
    /// Index of the container in `PreparedPod::containers`.
    pub(super) index: usize,
    /// Number of restarts before the run that begins.
    pub(super) restarts: u32,
    /// Addresses of the pod, IPv4 first.
    pub(super) addresses: Vec<IpAddr>,
    pub(super) image: UnpackedImage,
    /// Time at which the pod's spec was received, or the pod was adopted.
    pub(super) received_at: Instant,
}

/// Returns the runtime's container ID for one run of a container.
pub(super) fn container_id(uid: &str, container: &str, restarts: u32) -> String {
    format!("{uid}-{container}-{restarts}")
}

/// Creates a pod's folders and its cgroup; the agent watches for the cgroup.
pub(super) fn create_folders(
    resources: &KubeletResources,
    pod_spec: &LocalPodSpec,
) -> io::Result<()> {
    let layout = &resources.layout;
    fs::create_dir_all(layout.pod_cgroup(&resources.cgroups.v2, &pod_spec.uid))?;
    fs::create_dir_all(layout.pod(&pod_spec.uid))?;
    fs::create_dir_all(layout.pod_logs(&pod_spec.revision.namespace, &pod_spec.name))
}

/// Takes a network made ahead and publishes its namespace for the pod.
pub(super) async fn create_network(
    resources: Arc<KubeletResources>,
    uid: String,
) -> (PodEvent, EventResource) {
    let begin = Instant::now();
    let path = resources.layout.pod_namespace(&uid);
    let network = match resources.networks.acquire().await {
        Ok(network) => network,
        Err(error) => return (PodEvent::NetworkFailed(error_chain(&error)), EventResource::None),
    };
    // An attempt that failed, or a crash, may have left a mount at this path.
    net::unpublish(&path);
    if let Err(error) = net::publish(network.namespace.as_fd(), &path) {
        resources.networks.release(network.address).await;
        return (PodEvent::NetworkFailed(error_chain(&error)), EventResource::None);
    }
    let took_us = begin.elapsed().as_micros() as u64;
    info!(uid, address = %network.address.v4(), took_us, "pod connected");
    (
        PodEvent::NetworkReady(network.address.both().to_vec()),
        EventResource::Address(network.address),
    )
}

/// Starts one container and reports the result as an event.
pub(super) async fn start_container(
    resources: &Arc<KubeletResources>,
    prepared: &Arc<PreparedPod>,
    request: ContainerStartRequest,
) -> (PodEvent, EventResource) {
    let (index, received_at) = (request.index, request.received_at);
    let begin = Instant::now();
    // Here, not on the runtime's threads: they see another /sys/fs/cgroup, and not the mount of the pod's namespace.
    let created = create_cgroup(resources, prepared, index).and_then(|cgroup| {
        let network = net::open_namespace(&resources.layout.pod_namespace(&prepared.pod_spec.uid))?;
        Ok((cgroup, network))
    });
    let prepare = {
        let (resources, prepared) = (Arc::clone(resources), Arc::clone(prepared));
        move || prepare_bundle(&resources, &prepared, &request, created?)
    };
    match resources.runtime.run_container(prepare).await {
        Ok(launched) => {
            log_start(resources, prepared, index, &launched, received_at, begin);
            (PodEvent::Started { index }, EventResource::Process(Arc::new(launched.pidfd)))
        }
        Err(error) => {
            let (reason, message) = (error.reason().to_owned(), error_chain(&error));
            (PodEvent::StartFailed { index, reason, message }, EventResource::None)
        }
    }
}

fn log_start(
    resources: &KubeletResources,
    prepared: &PreparedPod,
    index: usize,
    launched: &LaunchedContainer,
    received_at: Instant,
    begin: Instant,
) {
    let micros = |duration: Duration| duration.as_micros() as u64;
    info!(
        pod = prepared.pod_spec.name,
        uid = prepared.pod_spec.uid,
        container = prepared.containers[index].name,
        pid = launched.process.pid,
        runtime = resources.runtime.name(),
        mount_us = micros(launched.mount_time),
        runtime_us = micros(launched.runtime_time),
        start_us = micros(begin.elapsed()),
        since_order_us = micros(received_at.elapsed()),
        "container started"
    );
}

/// Creates a container's cgroup with its limits, and records the kills that it has counted before this run.
fn create_cgroup(
    resources: &KubeletResources,
    prepared: &PreparedPod,
    index: usize,
) -> Result<ContainerCgroup, ContainerStartError> {
    let container = &prepared.containers[index];
    let (layout, uid) = (&resources.layout, &prepared.pod_spec.uid);
    let limits = bundle::parse_limits(container)?;
    let cgroup = resources.cgroups.create_container(layout, uid, &container.name, limits)?;
    let bundle = layout.bundle(uid, &container.name);
    fs::create_dir_all(&bundle).map_err(file_error(&bundle))?;
    // The cgroup may be that of an earlier run, whose kills do not explain the end of this one.
    let oom_kills = resources.cgroups.oom_kills(layout, uid, &container.name);
    write_file(&exits::oom_kills_file(&bundle), &oom_kills.to_string())?;
    Ok(cgroup)
}

/// Writes all files that a container needs; runs on a thread of the runtime.
fn prepare_bundle(
    resources: &KubeletResources,
    prepared: &PreparedPod,
    request: &ContainerStartRequest,
    (container_cgroup, network_namespace): (ContainerCgroup, OwnedFd),
) -> Result<ContainerLaunch, ContainerStartError> {
    let (pod_spec, container) = (&prepared.pod_spec, &prepared.containers[request.index]);
    let (layout, uid) = (&resources.layout, pod_spec.uid.as_str());
    let bundle = layout.bundle(uid, &container.name);
    let etc = layout.pod_etc(uid);
    let namespace = &pod_spec.revision.namespace;
    write_etc_files(&etc, pod_spec, &request.addresses)?;
    let termination_log = bundle.join("termination-log");
    write_file(&termination_log, "")?;
    // The container may run as any user, and the kubelet too lets each of them write the message.
    let anyone = fs::Permissions::from_mode(0o666);
    fs::set_permissions(&termination_log, anyone).map_err(file_error(&termination_log))?;
    let volumes = volume_folders(resources, pod_spec)?;
    let image = &request.image;
    let (passwd, group) = (image.read_text("etc/passwd"), image.read_text("etc/group"));
    // Without a mount point: the runtime spec contains the path below it.
    let cgroup = layout.container_cgroup(Path::new(""), uid, &container.name);
    // The runtime's mount namespace lacks the pod's mount point, so it opens this process's descriptor.
    let network = format!("/proc/{}/fd/{}", std::process::id(), network_namespace.as_raw_fd());
    let network = PathBuf::from(network);
    let context = BundleContext {
        node: layout.name(),
        uid,
        pod: &pod_spec.name,
        namespace,
        labels: &pod_spec.labels,
        addresses: &request.addresses,
        network: &network,
        rootfs: &bundle.join("rootfs"),
        etc: &etc,
        termination_log: &termination_log,
        cgroup: &cgroup,
        volumes: &volumes,
        sub_paths: &bundle.join("sub-paths"),
        passwd: &passwd,
        group: &group,
    };
    let config = request.image.config.config().as_ref();
    let spec = bundle::build_spec(&pod_spec.spec, container, config, &context)?;
    let sub_paths = sub_paths::open_sub_paths(&volumes, container, context.sub_paths)?;
    let text =
        serde_json::to_string(&spec).map_err(|error| BundleError::Spec(error.to_string()))?;
    write_file(&bundle.join("config.json"), &text)?;
    let log = layout.log(namespace, &pod_spec.name, &container.name);
    record_log_start(&bundle, &log)?;
    let user = spec.process().as_ref().map_or(0, |process| process.user().uid());
    Ok(ContainerLaunch {
        id: container_id(uid, &container.name, request.restarts),
        image: request.image.rootfs.clone(),
        writable_layer: layout.pod_data(uid).join("layers").join(&container.name),
        bundle,
        log,
        user,
        cgroup: container_cgroup,
        network: network_namespace,
        sub_paths,
    })
}

/// Writes the files of `/etc` that all containers of a pod share.
fn write_etc_files(
    etc: &Path,
    pod_spec: &LocalPodSpec,
    addresses: &[IpAddr],
) -> Result<(), ContainerStartError> {
    fs::create_dir_all(etc).map_err(file_error(etc))?;
    let namespace = &pod_spec.revision.namespace;
    for (name, text) in [
        ("hosts", bundle::hosts_file(&pod_spec.name, addresses)),
        ("resolv.conf", crate::dns::resolv_conf(DNS_ADDRESS.into(), namespace)),
        ("hostname", format!("{}\n", bundle::hostname(&pod_spec.name))),
    ] {
        let path = etc.join(name);
        // Other containers of the pod have mounted the file: they would find it empty in the middle of a write, and
        // never see another file in its place.
        if !fs::read_to_string(&path).is_ok_and(|existing| existing == text) {
            write_file(&path, &text)?;
        }
    }
    Ok(())
}

/// Records where this run's output begins in the log, for the exit's message.
fn record_log_start(bundle: &Path, log: &Path) -> Result<(), ContainerStartError> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder).map_err(file_error(folder))?;
    }
    // Without it, on a full disk, only a reader at the very moment of the first rotation can miss lines.
    let _ = container_log::create_start_file(log);
    write_file(&bundle.join("log-begin"), &container_log::end_position(log).to_string())?;
    let link = bundle.join("log");
    if fs::read_link(&link).is_err() {
        symlink(log, &link).map_err(file_error(&link))?;
    }
    Ok(())
}

/// Returns the folders behind a pod's volumes, and creates those of `emptyDir`.
fn volume_folders(
    resources: &KubeletResources,
    pod_spec: &LocalPodSpec,
) -> Result<BTreeMap<String, PathBuf>, ContainerStartError> {
    let folder = resources.layout.pod_data(&pod_spec.uid).join("volumes");
    let source = |volume: &Volume| -> Result<(String, PathBuf), ContainerStartError> {
        if let Some(host) = &volume.host_path {
            return Ok((volume.name.clone(), PathBuf::from(&host.path)));
        }
        if volume.empty_dir.is_none() {
            let description = format!("the kind of volume {}", volume.name);
            return Err(BundleError::Unsupported(description).into());
        }
        let path = folder.join(&volume.name);
        fs::create_dir_all(&path).map_err(file_error(&path))?;
        // As the kubelet does: every user of the pod may write.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).map_err(file_error(&path))?;
        Ok((volume.name.clone(), path))
    };
    pod_spec.spec.volumes.iter().flatten().map(source).collect()
}

fn write_file(path: &Path, text: &str) -> Result<(), ContainerStartError> {
    fs::write(path, text).map_err(file_error(path))
}

/// Removes everything of a pod but its logs.
pub(super) async fn remove_pod(
    resources: Arc<KubeletResources>,
    uid: String,
    address: Option<PodAddress>,
) -> (PodEvent, EventResource) {
    let worker = Arc::clone(&resources);
    let pod = uid.clone();
    let result = tokio::task::spawn_blocking(move || {
        let layout = &worker.layout;
        net::unpublish(&layout.pod_namespace(&pod));
        worker.cgroups.remove_pod(layout, &pod);
        for path in [layout.pod_data(&pod), layout.pod(&pod)] {
            match fs::remove_dir_all(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    warn!(path = %path.display(), %error, "left behind");
                }
                _ => {}
            }
        }
    });
    // A panic leaves files behind, but the pod must still end and its address be released.
    let _ = result.await;
    // Only now: while the namespace is published, its address is in use.
    if let Some(address) = address {
        resources.networks.release(address).await;
    }
    (PodEvent::Removed, EventResource::None)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use common::wire::NamespacedName;

    use super::*;

    #[test]
    fn files_that_running_containers_have_mounted_are_not_written_again() {
        let etc = std::env::temp_dir().join(format!("rouse-etc-{}", std::process::id()));
        let pod_spec = LocalPodSpec {
            uid: "u1".to_owned(),
            name: "hello".to_owned(),
            revision: NamespacedName::new("default", "hello-00001"),
            spec: serde_json::from_value(serde_json::json!({ "containers": [] })).unwrap(),
            labels: BTreeMap::new(),
            kubelet_probes: false,
        };
        let address = IpAddr::from([10, 244, 1, 7]);
        write_etc_files(&etc, &pod_spec, &[address]).unwrap();
        let files = ["hosts", "resolv.conf", "hostname"].map(|name| etc.join(name));
        for file in &files {
            let file = fs::File::options().write(true).open(file).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        }
        let unwritten = || {
            let modified = files.iter().map(|file| fs::metadata(file).unwrap().modified().unwrap());
            modified.filter(|time| *time == SystemTime::UNIX_EPOCH).count()
        };
        write_etc_files(&etc, &pod_spec, &[address]).unwrap();
        assert_eq!(unwritten(), 3);
        write_etc_files(&etc, &pod_spec, &[IpAddr::from([10, 244, 1, 8])]).unwrap();
        assert_eq!(unwritten(), 2, "the pod has another address");
        fs::remove_dir_all(&etc).unwrap();
    }
}
