//! Pure: OCI runtime spec of a container, from its pod spec and its image's configuration.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use common::quantity;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use oci_spec::image::Config as ImageConfig;
use oci_spec::runtime::Spec;
use serde_json::{Value, json};
use thiserror::Error;

use crate::cgroups::ContainerLimits;

/// Annotation with the signal that stops a container, as OCI's image spec names it (`conversion.md`).
pub const STOP_SIGNAL_ANNOTATION: &str = "org.opencontainers.image.stopSignal";
/// Default capabilities of a container: docker's and containerd's, without two. `MKNOD` is missing, because no device
/// cgroup keeps a container from the machine's devices here. `AUDIT_WRITE` is missing, too.
const DEFAULT_CAPABILITIES: [&str; 12] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
];
/// Search path for commands, unless image or container sets `PATH`.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Files below /proc and /sys that reveal or change the machine, hidden from containers: docker's list.
const MASKED_PATHS: [&str; 8] = [
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
];
/// Folders of /proc that containers may only read.
const READ_ONLY_PATHS: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Reason that a container of a pod spec cannot be created: in Kubernetes, `CreateContainerConfigError`.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BundleError {
    /// Neither container nor image names a command.
    #[error("neither the container nor its image says what to run: set command")]
    NoCommand,
    /// The user or group of image or container is not in the image's files.
    #[error(
        "user {0:?} is not in the image's /etc/passwd or /etc/group: set runAsUser to a number"
    )]
    UnknownUser(String),
    /// `runAsNonRoot` forbids the image's user, root.
    #[error("runAsNonRoot is set and the image runs as root: set runAsUser")]
    RunsAsRoot,
    /// The pod spec uses a feature that the local node does not have.
    #[error("{0} is not available on the local node")]
    Unsupported(String),
    /// A resource limit or request is not a quantity.
    #[error("{0:?} is not a quantity: write 500m, 2 or 64Mi")]
    InvalidQuantity(String),
    /// A `volumeMount` names a volume that the pod does not declare.
    #[error("volumeMount {0:?} names no volume of the pod")]
    UnknownVolume(String),
    /// The result does not parse as a runtime spec.
    #[error("cannot form the runtime spec: {0}")]
    Spec(String),
}

/// Facts about a container that are not in its spec.
#[derive(Clone, Debug)]
pub struct BundleContext<'a> {
    /// Name of the local node.
    pub node: &'a str,
    /// Uid of the pod.
    pub uid: &'a str,
    /// Name of the pod, without its namespace.
    pub pod: &'a str,
    /// Kubernetes namespace of the pod.
    pub namespace: &'a str,
    /// Labels of the pod, for the downward API.
    pub labels: &'a BTreeMap<String, String>,
    /// Addresses of the pod, IPv4 first.
    pub addresses: &'a [IpAddr],
    /// Path by which the runtime opens the pod's network namespace.
    pub network: &'a Path,
    /// Root directory of the container, mounted before the start.
    pub rootfs: &'a Path,
    /// Folder of the files that every container of the pod mounts: `hosts`, `resolv.conf`, `hostname`.
    pub etc: &'a Path,
    /// File on the node that receives the termination message.
    pub termination_log: &'a Path,
    /// Path of the container's cgroup below the v2 mount; only runc moves the process there.
    pub cgroup: &'a Path,
    /// Folders behind the pod's volumes, by volume name.
    pub volumes: &'a BTreeMap<String, PathBuf>,
    /// Folder in which the parts of volumes are mounted that `subPath` names, before the start.
    pub sub_paths: &'a Path,
    /// Text of the image's /etc/passwd.
    pub passwd: &'a str,
    /// Text of the image's /etc/group.
    pub group: &'a str,
}

/// Builds the runtime spec of a container.
pub fn build_spec(
    pod: &PodSpec,
    container: &Container,
    image: Option<&ImageConfig>,
    context: &BundleContext<'_>,
) -> Result<Spec, BundleError> {
    let ContainerEnvironment { process: env, declared } =
        build_environment(container, image, context)?;
    let args = build_command(container, image, &declared)?;
    let user = resolve_user(pod, container, image, context)?;
    let security = container.security_context.clone().unwrap_or_default();
    // No device cgroup and no user namespace separate a container from the machine here, so root must stay bounded.
    if security.privileged == Some(true) {
        return Err(BundleError::Unsupported("privileged".to_owned()));
    }
    let capabilities = capability_sets(container, user.uid);
    let from_image =
        image.and_then(|image| image.working_dir().clone()).filter(|dir| !dir.is_empty());
    let cwd = container.working_dir.clone().or(from_image).unwrap_or_else(|| "/".to_owned());
    let env: Vec<String> = env.iter().map(|(key, value)| format!("{key}={value}")).collect();
    let mut value = json!({
        "ociVersion": "1.0.2",
        "hostname": hostname(context.pod),
        "root": { "path": context.rootfs, "readonly": security.read_only_root_filesystem.unwrap_or(false) },
        "process": {
            "terminal": false, "args": args, "env": env, "cwd": cwd,
            "user": { "uid": user.uid, "gid": user.gid, "additionalGids": user.groups },
            "noNewPrivileges": security.allow_privilege_escalation == Some(false),
            "capabilities": capabilities,
        },
        "mounts": build_mounts(container, context)?,
        "linux": {
            "cgroupsPath": Path::new("/").join(context.cgroup),
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
                { "type": "network", "path": context.network },
            ],
            "maskedPaths": MASKED_PATHS, "readonlyPaths": READ_ONLY_PATHS,
        },
    });
    // The node reads it again when it stops the container, which may be after a restart of the node.
    if let Some(signal) = image.and_then(|image| image.stop_signal().as_ref()) {
        value["annotations"] = json!({ STOP_SIGNAL_ANNOTATION: signal });
    }
    serde_json::from_value(value).map_err(|error| BundleError::Spec(error.to_string()))
}

/// Reads the limits of a container: `limits` as hard limits, the CPU request as its weight. A limit of 0 is none, as in
/// the kubelet.
pub fn parse_limits(container: &Container) -> Result<ContainerLimits, BundleError> {
    let resources = container.resources.clone().unwrap_or_default();
    let parse = |map: &Option<BTreeMap<String, _>>, key: &str, read: fn(&str) -> Option<u64>| {
        let quantity: Option<&k8s_openapi::apimachinery::pkg::api::resource::Quantity> =
            map.as_ref().and_then(|map| map.get(key));
        quantity
            .map(|text| read(&text.0).ok_or_else(|| BundleError::InvalidQuantity(text.0.clone())))
            .transpose()
    };
    // As in the kubelet, one CPU is 1024 shares.
    let cpu_shares = parse(&resources.requests, "cpu", quantity::parse_milli)?
        .map(|milli| milli.saturating_mul(1024) / 1000);
    let memory = parse(&resources.limits, "memory", quantity::parse_units)?;
    let cpu_milli = parse(&resources.limits, "cpu", quantity::parse_milli)?;
    Ok(ContainerLimits {
        memory: memory.filter(|&bytes| bytes > 0),
        cpu_milli: cpu_milli.filter(|&milli| milli > 0),
        cpu_shares,
    })
}

/// Returns the mount point for the `subPath` of the container's `volumeMount` with this index.
pub fn sub_path_mount_point(folder: &Path, index: usize) -> PathBuf {
    folder.join(index.to_string())
}

/// Returns a pod's name as its host name: at most 63 characters, as the kubelet cuts it.
pub fn hostname(pod: &str) -> &str {
    let end = pod.char_indices().nth(63).map_or(pod.len(), |(at, _)| at);
    pod[..end].trim_end_matches(['-', '.'])
}

/// Returns the text of the pod's /etc/hosts.
pub fn hosts_file(pod: &str, addresses: &[IpAddr]) -> String {
    let lines = addresses.iter().map(|ip| format!("{ip}\t{}\n", hostname(pod)));
    let fixed = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
    std::iter::once(fixed.to_owned()).chain(lines).collect()
}

/// Environment variables of a container.
struct ContainerEnvironment {
    /// Variables of the process: defaults, then the image's, then those of `env`; later values replace earlier ones.
    process: Vec<(String, String)>,
    /// Variables of `env`: as in Kubernetes, `$(NAME)` in `env`, `command` and `args` refers to these only.
    declared: HashMap<String, String>,
}

/// Returns the environment of a container.
fn build_environment(
    container: &Container,
    image: Option<&ImageConfig>,
    context: &BundleContext<'_>,
) -> Result<ContainerEnvironment, BundleError> {
    let mut env = vec![("PATH".to_owned(), DEFAULT_PATH.to_owned())];
    // A later variable replaces an earlier one of the name, so the image's come before those of the pod.
    let mut set = |key: &str, value: String| match env.iter_mut().find(|(name, _)| name == key) {
        Some((_, old)) => *old = value,
        None => env.push((key.to_owned(), value)),
    };
    set("HOSTNAME", hostname(context.pod).to_owned());
    for text in image.and_then(|image| image.env().as_ref()).into_iter().flatten() {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        set(key, value.to_owned());
    }
    if let Some(source) = container.env_from.iter().flatten().next() {
        let kind = if source.config_map_ref.is_some() { "configMapRef" } else { "secretRef" };
        return Err(BundleError::Unsupported(format!("envFrom {kind}")));
    }
    // As in Kubernetes, `$(NAME)` in `env` refers only to variables that stand before it.
    let mut declared: HashMap<String, String> = HashMap::new();
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (Some(text), _) => expand_variables(text, &declared),
            (None, None) => String::new(),
            (None, Some(source)) => {
                let path = source.field_ref.as_ref().map(|field| field.field_path.as_str());
                let value = path.and_then(|path| downward_field(path, context));
                value.ok_or_else(|| {
                    BundleError::Unsupported(format!("valueFrom of {}", variable.name))
                })?
            }
        };
        declared.insert(variable.name.clone(), value.clone());
        set(&variable.name, value);
    }
    Ok(ContainerEnvironment { process: env, declared })
}

/// Returns a field of the downward API; `None` if the local node does not have it.
fn downward_field(path: &str, context: &BundleContext<'_>) -> Option<String> {
    let quoted = |prefix: &str| path.strip_prefix(prefix)?.strip_suffix("']");
    match path {
        "metadata.name" => Some(context.pod.to_owned()),
        "metadata.namespace" => Some(context.namespace.to_owned()),
        "metadata.uid" => Some(context.uid.to_owned()),
        "spec.nodeName" => Some(context.node.to_owned()),
        "status.podIP" => context.addresses.first().map(ToString::to_string),
        "status.podIPs" => {
            Some(context.addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
        }
        "status.hostIP" => Some(crate::layout::GATEWAY_V4.to_string()),
        _ => quoted("metadata.labels['")
            .map(|key| context.labels.get(key).cloned().unwrap_or_default()),
    }
}

/// Replaces `$(NAME)`; `$$` becomes a dollar; an unknown name stays as written, as in Kubernetes.
fn expand_variables(text: &str, variables: &HashMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(dollar) = rest.find('$') {
        out.push_str(&rest[..dollar]);
        rest = &rest[dollar..];
        let name = rest.strip_prefix("$(").and_then(|inner| inner.split_once(')'));
        // Checked first, so that `$$(NAME)` is the text `$(NAME)`.
        if let Some(after) = rest.strip_prefix("$$") {
            out.push('$');
            rest = after;
        } else if let Some((name, after)) = name {
            match variables.get(name) {
                Some(value) => out.push_str(value),
                None => out.push_str(&format!("$({name})")),
            }
            rest = after;
        } else {
            out.push('$');
            rest = &rest[1..];
        }
    }
    out + rest
}

/// Returns the argument list: `command` replaces entrypoint and command of the image, `args` only its command.
fn build_command(
    container: &Container,
    image: Option<&ImageConfig>,
    variables: &HashMap<String, String>,
) -> Result<Vec<String>, BundleError> {
    let written = |list: &Option<Vec<String>>| -> Option<Vec<String>> {
        let list = list.as_ref().filter(|list| !list.is_empty())?;
        Some(list.iter().map(|text| expand_variables(text, variables)).collect())
    };
    let entrypoint = image.and_then(|image| image.entrypoint().clone()).unwrap_or_default();
    let cmd = image.and_then(|image| image.cmd().clone()).unwrap_or_default();
    // As in Kubernetes, the image's own command is dropped with its entrypoint.
    let command = match (written(&container.command), written(&container.args)) {
        (Some(command), args) => [command, args.unwrap_or_default()].concat(),
        (None, Some(args)) => [entrypoint, args].concat(),
        (None, None) => [entrypoint, cmd].concat(),
    };
    if command.first().is_none_or(String::is_empty) {
        Err(BundleError::NoCommand)
    } else {
        Ok(command)
    }
}

/// User, group and supplementary groups of a process.
#[derive(Debug, PartialEq, Eq)]
struct ProcessUser {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

/// Returns the user of a container: from its security context, the pod's, or else the image.
fn resolve_user(
    pod: &PodSpec,
    container: &Container,
    image: Option<&ImageConfig>,
    context: &BundleContext<'_>,
) -> Result<ProcessUser, BundleError> {
    let security = container.security_context.clone().unwrap_or_default();
    let pod_security = pod.security_context.clone().unwrap_or_default();
    // The number replaces the image's user, which /etc/passwd may not have. It is parsed the same way, because its
    // entry in /etc/passwd gives the group.
    let text = match security.run_as_user.or(pod_security.run_as_user) {
        Some(uid) => uid.to_string(),
        None => image.and_then(|image| image.user().clone()).unwrap_or_default(),
    };
    let mut user = parse_user(&text, context)?;
    if let Some(gid) = security.run_as_group.or(pod_security.run_as_group) {
        user.gid =
            u32::try_from(gid).ok().ok_or_else(|| BundleError::UnknownUser(gid.to_string()))?;
    }
    let extra = pod_security.supplemental_groups.into_iter().flatten().chain(pod_security.fs_group);
    user.groups.extend(extra.filter_map(|gid| u32::try_from(gid).ok()));
    if security.run_as_non_root.or(pod_security.run_as_non_root) == Some(true) && user.uid == 0 {
        return Err(BundleError::RunsAsRoot);
    }
    Ok(user)
}

/// Parses `USER[:GROUP]`, each a name or a number, with the image's passwd and group files.
fn parse_user(text: &str, context: &BundleContext<'_>) -> Result<ProcessUser, BundleError> {
    let (name, group) =
        text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
    let name = if name.is_empty() { "0" } else { name };
    let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
    let entry = context
        .passwd
        .lines()
        .map(fields)
        .find(|entry| entry.len() > 3 && (entry[0] == name || entry[2] == name));
    // A number needs no entry in /etc/passwd; its group is then 0.
    let uid = name.parse().ok().or_else(|| entry.as_ref()?[2].parse().ok());
    let uid = uid.ok_or_else(|| BundleError::UnknownUser(name.to_owned()))?;
    let gid = entry.as_ref().and_then(|entry| entry[3].parse().ok()).unwrap_or(0);
    // Membership in groups is by name, so a number without an entry has none.
    let login = entry.map(|entry| entry[0].clone()).unwrap_or_default();
    let groups =
        context.group.lines().map(fields).filter(|entry| entry.len() > 3).collect::<Vec<_>>();
    let gid = match group {
        None => gid,
        Some(group) => {
            let named = || groups.iter().find(|entry| entry[0] == group)?[2].parse().ok();
            let gid = group.parse().ok().or_else(named);
            gid.ok_or_else(|| BundleError::UnknownUser(group.to_owned()))?
        }
    };
    let member = |entry: &&Vec<String>| {
        !login.is_empty() && entry[3].split(',').any(|member| member == login)
    };
    let groups = groups.iter().filter(member).filter_map(|entry| entry[2].parse().ok()).collect();
    Ok(ProcessUser { uid, gid, groups })
}

/// Returns the capability sets of a process.
fn capability_sets(container: &Container, uid: u32) -> Value {
    let requested =
        container.security_context.clone().unwrap_or_default().capabilities.unwrap_or_default();
    let plain = |name: &String| name.trim_start_matches("CAP_").to_ascii_uppercase();
    let drop: Vec<String> = requested.drop.iter().flatten().map(plain).collect();
    let mut names: Vec<String> = DEFAULT_CAPABILITIES.iter().map(|&name| name.to_owned()).collect();
    names.retain(|name| !drop.contains(name) && !drop.iter().any(|name| name == "ALL"));
    let add = requested.add.iter().flatten().map(plain).filter(|name| name != "ALL");
    for name in add {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let capabilities: Vec<String> = names.iter().map(|name| format!("CAP_{name}")).collect();
    // Only root holds them. Another user gains them by a file's capabilities, within the bounding set.
    let active = if uid == 0 { capabilities.clone() } else { Vec::new() };
    json!({ "bounding": capabilities, "effective": active, "permitted": active })
}

/// Returns the mounts of a container: the runtime's usual ones, then the pod's files and its volumes.
fn build_mounts(
    container: &Container,
    context: &BundleContext<'_>,
) -> Result<Vec<Value>, BundleError> {
    let mount = |destination: &str, kind: &str, options: &[&str]| json!({ "destination": destination, "type": kind, "source": kind, "options": options });
    let bind = |destination: &str, source: &Path, options: &[&str]| {
        let options = [&["rbind"], options].concat();
        json!({ "destination": destination, "type": "bind", "source": source, "options": options })
    };
    let shm = ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"];
    let pts = ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"];
    let mut mounts = vec![
        mount("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount("/dev/pts", "devpts", &pts),
        mount("/dev/shm", "tmpfs", &shm),
        mount("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ];
    let mut binds = Vec::new();
    for file in ["hosts", "resolv.conf", "hostname"] {
        binds.push(bind(&format!("/etc/{file}"), &context.etc.join(file), &["rw"]));
    }
    let message = container.termination_message_path.as_deref().unwrap_or("/dev/termination-log");
    binds.push(bind(message, context.termination_log, &["rw"]));
    for (index, volume) in container.volume_mounts.iter().flatten().enumerate() {
        let source = context.volumes.get(&volume.name);
        let source = source.ok_or_else(|| BundleError::UnknownVolume(volume.name.clone()))?;
        let inner = volume.sub_path.as_deref().unwrap_or_default();
        if inner.split('/').any(|part| part == "..") {
            return Err(BundleError::Unsupported(format!("subPath {inner}")));
        }
        // Not the path below the volume: a container can put a link in its place before the mount.
        let source = if inner.is_empty() {
            source.clone()
        } else {
            sub_path_mount_point(context.sub_paths, index)
        };
        let access = if volume.read_only == Some(true) { "ro" } else { "rw" };
        binds.push(bind(&volume.mount_path, &source, &[access]));
    }
    // As containerd does: a mount would hide an earlier one below its path.
    binds.sort_by_key(|it| {
        let destination = it["destination"].as_str().unwrap_or_default();
        Path::new(destination).components().count()
    });
    mounts.extend(binds);
    Ok(mounts)
}

#[cfg(test)]
mod tests;
