//! Pure: rules of pods and containers (knative/serving `pkg/apis/serving/{k8s_validation,fieldmask}.go`).

use k8s_openapi::api::core::v1::{Container, ContainerPort, PodSpec};
use serde_json::Value;

use super::{Problem, probe, typed};
use crate::knative::RevisionSpec;

const SPEC: &str = "spec.template.spec";
/// Pod fields that no feature flag guards.
const POD_FIELDS: [&str; 6] = [
    "serviceAccountName",
    "containers",
    "volumes",
    "imagePullSecrets",
    "enableServiceLinks",
    "automountServiceAccountToken",
];
/// Container fields that may be set; `lifecycle` may not.
const CONTAINER_FIELDS: [&str; 17] = [
    "name",
    "args",
    "command",
    "env",
    "workingDir",
    "envFrom",
    "image",
    "imagePullPolicy",
    "livenessProbe",
    "ports",
    "readinessProbe",
    "resources",
    "securityContext",
    "startupProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
    "volumeMounts",
];
const SECURITY_FIELDS: [&str; 8] = [
    "capabilities",
    "readOnlyRootFilesystem",
    "runAsUser",
    "runAsGroup",
    "runAsNonRoot",
    "allowPrivilegeEscalation",
    "seccompProfile",
    "privileged",
];
const RESERVED_ENV: [&str; 4] = ["PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION"];
const RESERVED_PORTS: [i32; 6] = [8008, 8012, 8013, 8022, 9090, 9091];
const RESERVED_PATHS: [&str; 6] = ["/", "/dev", "/dev/log", "/tmp", "/var", "/var/log"];

/// Reads a Revision's spec and checks all of it.
pub(super) fn revision_spec(value: Option<&Value>, problems: &mut Vec<Problem>) -> RevisionSpec {
    let Some(Value::Object(object)) = value else {
        problems.push(Problem::missing(format!("{SPEC}.containers")));
        return RevisionSpec::default();
    };
    let (mut own, mut pod) = (object.clone(), object.clone());
    let limits = [
        "containerConcurrency",
        "timeoutSeconds",
        "responseStartTimeoutSeconds",
        "idleTimeoutSeconds",
    ];
    own.retain(|key, _| limits.contains(&key.as_str()));
    pod.retain(|key, _| !limits.contains(&key.as_str()));
    let mut spec: RevisionSpec = typed(Some(&Value::Object(own)), SPEC, problems);
    let before = problems.len();
    let pod = Value::Object(pod);
    spec.pod = typed(Some(&pod), SPEC, problems);
    if problems.len() == before {
        masks(&pod, problems);
    }
    // What could not be read at all is no pod without containers.
    if problems.len() == before || spec.pod != PodSpec::default() {
        pod_rules(&spec.pod, problems);
    }
    spec
}

/// Fields that Kubernetes knows and Knative does not allow.
fn masks(pod: &Value, problems: &mut Vec<Problem>) {
    if let Some(init) = pod.get("initContainers").and_then(Value::as_array) {
        let message = format!(
            "pod spec support for init-containers is off, but found {} init containers",
            init.len()
        );
        problems.push(Problem::new(format!("{SPEC}.initContainers"), message));
    }
    let allowed = [&POD_FIELDS[..], &["initContainers"]].concat();
    mask(Some(pod), SPEC, &allowed, problems);
    let containers = pod.get("containers").and_then(Value::as_array);
    for (index, container) in containers.into_iter().flatten().enumerate() {
        let path = format!("{SPEC}.containers[{index}]");
        mask(Some(container), &path, &CONTAINER_FIELDS, problems);
        let security = container.get("securityContext");
        mask(security, &format!("{path}.securityContext"), &SECURITY_FIELDS, problems);
        if security.and_then(|it| it.get("privileged")) == Some(&Value::Bool(true)) {
            problems.push(Problem::invalid(format!("{path}.securityContext.privileged"), true));
        }
        let capabilities = security.and_then(|it| it.get("capabilities"));
        mask(capabilities, &format!("{path}.securityContext.capabilities"), &["drop"], problems);
        let ports = container.get("ports").and_then(Value::as_array);
        for (number, port) in ports.into_iter().flatten().enumerate() {
            let path = format!("{path}.ports[{number}]");
            mask(Some(port), &path, &["containerPort", "name", "protocol"], problems);
        }
    }
}

fn mask(value: Option<&Value>, path: &str, allowed: &[&str], problems: &mut Vec<Problem>) {
    let fields = value.and_then(Value::as_object).into_iter().flat_map(|it| it.keys());
    let strange = fields.filter(|key| !allowed.contains(&key.as_str()));
    problems.extend(strange.map(|key| Problem::disallowed(format!("{path}.{key}"))));
}

fn pod_rules(pod: &PodSpec, problems: &mut Vec<Problem>) {
    if pod.containers.is_empty() {
        problems.push(Problem::missing(format!("{SPEC}.containers")));
    }
    let several = pod.containers.len() > 1;
    let with_ports =
        |container: &&Container| container.ports.as_ref().is_some_and(|ports| !ports.is_empty());
    let serving = pod.containers.iter().filter(with_ports).count();
    let all_ports = format!("{SPEC}.containers[*].ports");
    if several && serving == 0 {
        let problem = Problem::missing(all_ports);
        problems.push(problem.advise("give ports to the one container that serves"));
    } else if serving > 1 {
        let problem = Problem::new(all_ports, "more than one container port is set");
        problems.push(problem.advise("Only a single port is allowed across all containers"));
    }
    for (index, container) in pod.containers.iter().enumerate() {
        let path = format!("{SPEC}.containers[{index}]");
        container_rules(container, &path, problems);
        let alone = !several || with_ports(&container);
        probe_rules(container, alone, &path, problems);
    }
    names(pod, problems);
    volumes(pod, problems);
}

fn names(pod: &PodSpec, problems: &mut Vec<Problem>) {
    let mut seen = std::collections::BTreeSet::new();
    for (index, container) in pod.containers.iter().enumerate() {
        let (name, path) = (&container.name, format!("{SPEC}.containers[{index}].name"));
        if name == "queue-proxy" {
            problems.push(Problem::new(path, format!("{name:?} is a reserved container name")));
        } else if !name.is_empty() && !common::wire::is_label(name) {
            problems.push(Problem::invalid(path, name));
        } else if !name.is_empty() && !seen.insert(name) {
            problems.push(Problem::new(path, format!("duplicate container name {name:?}")));
        }
    }
}

fn container_rules(container: &Container, path: &str, problems: &mut Vec<Problem>) {
    match container.image.as_deref() {
        None | Some("") => problems.push(Problem::missing(format!("{path}.image"))),
        Some(image) => {
            if let Err(why) = image_reference(image) {
                let problem =
                    Problem::new(format!("{path}.image"), "Failed to parse image reference");
                problems.push(problem.advise(format!("image: {image:?}, error: {why}")));
            }
        }
    }
    for (index, env) in container.env.iter().flatten().enumerate() {
        let path = format!("{path}.env[{index}]");
        if env.name.is_empty() {
            problems.push(Problem::missing(format!("{path}.name")));
        } else if RESERVED_ENV.contains(&env.name.as_str()) {
            let message = format!("{:?} is a reserved environment variable", env.name);
            problems.push(Problem::new(format!("{path}.name"), message));
        }
    }
    let ports = container.ports.as_deref().unwrap_or_default();
    if ports.len() > 1 {
        let problem = Problem::new(format!("{path}.ports"), "more than one container port is set");
        problems.push(problem.advise("Only a single port is allowed"));
    }
    for (index, port) in ports.iter().enumerate() {
        port_rules(port, &format!("{path}.ports[{index}]"), problems);
    }
}

fn port_rules(port: &ContainerPort, path: &str, problems: &mut Vec<Problem>) {
    let number = port.container_port;
    let at = format!("{path}.containerPort");
    if RESERVED_PORTS.contains(&number) {
        let message = format!("{number} is a reserved port, please use a different value");
        problems.push(Problem::new(at, message));
    } else if !(1..=65535).contains(&number) {
        problems.push(Problem::bounds(at, 1, number, 65535));
    }
    if let Some(name) = port.name.as_deref().filter(|n| !matches!(*n, "" | "h2c" | "http1")) {
        let problem =
            Problem::new(format!("{path}.name"), format!("Port name {name} is not allowed"));
        problems.push(problem.advise("Name must be empty, or one of: 'h2c', 'http1'"));
    }
    if let Some(protocol) = port.protocol.as_deref().filter(|it| !matches!(*it, "" | "TCP")) {
        problems.push(Problem::invalid(format!("{path}.protocol"), protocol).advise("use TCP"));
    }
}

fn probe_rules(container: &Container, serves: bool, path: &str, problems: &mut Vec<Problem>) {
    let port = container.ports.iter().flatten().next().map(|port| port.container_port);
    let probes = [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ];
    for (name, it) in probes {
        let Some(it) = it else { continue };
        let path = format!("{path}.{name}");
        if serves {
            probe::check(it, port, &path, problems);
        } else {
            problems.push(Problem::disallowed(path));
        }
    }
}

fn volumes(pod: &PodSpec, problems: &mut Vec<Problem>) {
    let volumes = pod.volumes.as_deref().unwrap_or_default();
    let mut mounted = std::collections::BTreeSet::new();
    for (index, container) in pod.containers.iter().enumerate() {
        let mut paths = std::collections::BTreeSet::new();
        for (number, mount) in container.volume_mounts.iter().flatten().enumerate() {
            let at = format!("{SPEC}.containers[{index}].volumeMounts[{number}]");
            let path = mount.mount_path.trim_end_matches('/');
            let path = if path.is_empty() { "/" } else { path };
            if !mount.mount_path.starts_with('/') {
                problems.push(Problem::invalid(format!("{at}.mountPath"), &mount.mount_path));
            } else if RESERVED_PATHS.contains(&path) {
                let message = format!("mountPath {path:?} is a reserved path");
                problems.push(Problem::new(format!("{at}.mountPath"), message));
            } else if !paths.insert(path) {
                let message = format!("{path:?} must be unique");
                problems.push(Problem::new(format!("{at}.mountPath"), message));
            }
            if !volumes.iter().any(|volume| volume.name == mount.name) {
                let message = "volumeMount has no matching volume";
                problems.push(Problem::new(format!("{at}.name"), message));
            }
            mounted.insert(mount.name.as_str());
        }
    }
    for (index, volume) in volumes.iter().enumerate() {
        let at = format!("{SPEC}.volumes[{index}]");
        if !mounted.contains(volume.name.as_str()) {
            let message = format!("volume with name {:?} not mounted", volume.name);
            problems.push(Problem::new(format!("{at}.name"), message));
        }
        if volume.empty_dir.is_none() {
            let problem =
                Problem::new(at, "volume support is disabled, but found another than emptyDir");
            problems.push(problem.advise("the local node has only emptyDir"));
        }
    }
}

/// Whether `image` is a reference: `[host[:port]/]path[:tag][@digest]`, or `oci:PATH` for a layout on disk.
fn image_reference(image: &str) -> Result<(), &'static str> {
    if let Some(path) = image.strip_prefix("oci:") {
        return if path.is_empty() { Err("oci: needs a path") } else { Ok(()) };
    }
    let (rest, digest) = image.split_once('@').map_or((image, None), |(rest, it)| (rest, Some(it)));
    if let Some(digest) = digest {
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err("the digest must be sha256: and 64 hexadecimal digits");
        }
    }
    let (path, tag) = match rest.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (rest, None),
    };
    let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if tag.is_some_and(|tag| tag.is_empty() || tag.len() > 128 || !tag.bytes().all(word)) {
        return Err("the tag must be 1 to 128 of letters, digits, '.', '_' and '-'");
    }
    let (host, path) = match path.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => (host, path),
        _ => ("", path),
    };
    let lower = |byte: u8| word(byte) && !byte.is_ascii_uppercase();
    if path.split('/').any(|part| part.is_empty() || !part.bytes().all(lower)) {
        return Err("the name must be lower-case letters, digits, '.', '_', '-' and '/'");
    }
    if !host.bytes().all(|byte| word(byte) || byte == b':') {
        return Err("the registry must be a host name and maybe a port");
    }
    Ok(())
}
