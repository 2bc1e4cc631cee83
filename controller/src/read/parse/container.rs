//! Pure: rules of containers (knative/serving `pkg/apis/serving/k8s_validation.go` at 98e5ef9).

use k8s_openapi::api::core::v1::{Container, ContainerPort, EnvFromSource, EnvVar};

use super::{
    dns_names,
    pod::{PodContainerRole, ServingPort},
    probe, security,
    settings::RuleSettings,
};
use crate::model::{cluster_state::PlatformKind, problem::Problem};

const RESERVED_ENV: [&str; 4] = ["PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION"];
/// Ports of Knative's sidecar and profiler. Rouse uses none of them in pods but 8022, where the agent's pod server
/// answers the preStop hook. They are refused so that an accepted manifest also works with Knative.
const RESERVED_PORTS: [i32; 6] = [8008, 8012, 8013, 8022, 9090, 9091];

/// Checks one container; `port` is the port that gets the pod's requests.
pub(super) fn check_container(
    container: &Container,
    role: PodContainerRole,
    port: &ServingPort,
    at: &str,
    settings: &RuleSettings<'_>,
    problems: &mut Vec<Problem>,
) {
    check_container_name(container, at, problems);
    check_image(container, at, settings.platform, problems);
    check_env(container, role, at, problems);
    check_env_from(container.env_from.as_deref().unwrap_or_default(), at, problems);
    // The local node has no ConfigMaps and Secrets to refer to.
    if settings.platform == PlatformKind::Local {
        refuse_config_refs(container, at, problems);
    }
    check_ports(container, role, at, problems);
    probe::check_probes(container, role, port, at, settings.features, problems);
    security::check_container_context(container, at, settings, problems);
    let policy = container.termination_message_policy.as_deref().unwrap_or_default();
    if !matches!(policy, "" | "File" | "FallbackToLogsOnError") {
        problems.push(Problem::invalid(format!("{at}.terminationMessagePolicy"), policy));
    }
}

fn check_container_name(container: &Container, at: &str, problems: &mut Vec<Problem>) {
    let name = &container.name;
    if name == "queue-proxy" {
        let message = format!("{name:?} is a reserved container name");
        problems.push(Problem::new(format!("{at}.name"), message));
    } else if !name.is_empty() && !dns_names::dns1123_errors(name).is_empty() {
        // Knative leaves this to the Deployment, whose pods are then never created.
        problems.push(Problem::invalid(format!("{at}.name"), name));
    }
}

fn check_image(
    container: &Container,
    at: &str,
    platform: PlatformKind,
    problems: &mut Vec<Problem>,
) {
    let at = format!("{at}.image");
    let image = container.image.as_deref().unwrap_or_default();
    if image.is_empty() {
        problems.push(Problem::missing(at));
        return;
    }
    if let Err(error) = check_image_reference(image, platform) {
        let problem = Problem::new(at, "Failed to parse image reference");
        problems.push(problem.with_details(format!("image: {image:?}, error: {error}")));
    }
}

fn check_env(container: &Container, role: PodContainerRole, at: &str, problems: &mut Vec<Problem>) {
    // The platform sets PORT in the serving container only.
    let reserved = |name: &str| {
        RESERVED_ENV.contains(&name) && (role == PodContainerRole::Serving || name != "PORT")
    };
    for (index, EnvVar { name, .. }) in container.env.iter().flatten().enumerate() {
        let path = format!("{at}.env[{index}].name");
        if name.is_empty() {
            problems.push(Problem::missing(path));
        } else if reserved(name) {
            let message = format!("{name:?} is a reserved environment variable");
            problems.push(Problem::new(path, message));
        }
    }
}

fn check_env_from(all: &[EnvFromSource], at: &str, problems: &mut Vec<Problem>) {
    for (index, one) in all.iter().enumerate() {
        let at = format!("{at}.envFrom[{index}]");
        let paths = format!("{at}.configMapRef, {at}.secretRef");
        match (&one.config_map_ref, &one.secret_ref) {
            (Some(_), Some(_)) => problems.push(Problem::several_set(paths)),
            (None, None) => problems.push(Problem::none_set(paths)),
            _ => {}
        }
    }
}

/// Refuses variables from ConfigMaps and Secrets on the local node, which has neither: the container could not start.
fn refuse_config_refs(container: &Container, at: &str, problems: &mut Vec<Problem>) {
    let from = container.env.iter().flatten().enumerate();
    let from = from.filter(|(_, variable)| {
        let source = variable.value_from.as_ref();
        source.is_some_and(|it| it.config_map_key_ref.is_some() || it.secret_key_ref.is_some())
    });
    let single_refs = from.map(|(index, _)| format!("{at}.env[{index}].valueFrom"));
    let whole_refs =
        (0..container.env_from.iter().flatten().count()).map(|it| format!("{at}.envFrom[{it}]"));
    for path in single_refs.chain(whole_refs) {
        let advice = "the local node has no ConfigMaps and no Secrets";
        problems.push(Problem::disallowed(path).with_advice(advice));
    }
}

fn check_ports(
    container: &Container,
    role: PodContainerRole,
    at: &str,
    problems: &mut Vec<Problem>,
) {
    let ports = container.ports.as_deref().unwrap_or_default();
    if role == PodContainerRole::Init && !ports.is_empty() {
        let message = "field not allowed in an init container";
        problems.push(Problem::new(format!("{at}.ports"), message));
        return;
    }
    for (index, port) in ports.iter().enumerate() {
        check_port(port, &format!("{at}.ports[{index}]"), problems);
    }
}

fn check_port(port: &ContainerPort, at: &str, problems: &mut Vec<Problem>) {
    let number = port.container_port;
    let path = format!("{at}.containerPort");
    if RESERVED_PORTS.contains(&number) {
        let problem = Problem::invalid(path, format!("{number} is a reserved port"));
        let details = format!("{number} is a reserved port, please use a different value");
        problems.push(problem.with_details(details));
    } else if !(1..=65535).contains(&number) {
        problems.push(Problem::out_of_bounds(path, 1, number, 65535));
    }
    // In Knative, the name of the port selects the protocol of the Revision.
    if let Some(name) = port.name.as_deref().filter(|n| !matches!(*n, "" | "h2c" | "http1")) {
        let problem = Problem::new(at, format!("Port name {name} is not allowed"));
        problems.push(problem.with_details("Name must be empty, or one of: 'h2c', 'http1'"));
    }
    if let Some(protocol) = port.protocol.as_deref().filter(|it| !matches!(*it, "" | "TCP")) {
        problems.push(Problem::invalid(format!("{at}.protocol"), protocol).with_advice("use TCP"));
    }
}

/// Checks that `image` is a reference: `[host[:port]/]path[:tag][@digest]`, or `oci:PATH` for a layout on local disk.
fn check_image_reference(image: &str, platform: PlatformKind) -> Result<(), String> {
    if let (Some(path), PlatformKind::Local) = (image.strip_prefix("oci:"), platform) {
        return if path.is_empty() { Err("oci: needs a path".into()) } else { Ok(()) };
    }
    // Begins as go-containerregistry's message does, then names the faulty part.
    let wrong = |why: &str| Err(format!("could not parse reference: {image}: {why}"));
    let (rest, digest) = image.split_once('@').map_or((image, None), |(rest, it)| (rest, Some(it)));
    if let Some(digest) = digest {
        let hex = digest.strip_prefix("sha256:").unwrap_or_default();
        if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return wrong("the digest must be sha256: and 64 hexadecimal digits");
        }
    }
    // A colon before the last slash separates a registry's port, not a tag.
    let (path, tag) = match rest.rsplit_once(':') {
        Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
        _ => (rest, None),
    };
    let word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if tag.is_some_and(|tag| tag.is_empty() || tag.len() > 128 || !tag.bytes().all(word)) {
        return wrong("the tag must be 1 to 128 of letters, digits, '.', '_' and '-'");
    }
    // Without a dot or port the first segment is part of the path on Docker Hub (distribution's reference grammar).
    let (host, path) = match path.split_once('/') {
        Some((host, path)) if host.contains(['.', ':']) || host == "localhost" => (host, path),
        _ => ("", path),
    };
    let lower = |byte: u8| word(byte) && !byte.is_ascii_uppercase();
    if path.len() > 255 || path.split('/').any(|it| it.is_empty() || !it.bytes().all(lower)) {
        return wrong("the name must be lower-case letters, digits, '.', '_', '-' and '/'");
    }
    if !host.bytes().all(|byte| word(byte) || byte == b':') {
        return wrong("the registry must be a host name and maybe a port");
    }
    Ok(())
}
