//! Pure: labels and annotations, in Knative's words.
//!
//! knative/serving `pkg/apis/serving/register.go`, knative/networking `pkg/apis/networking/register.go`; where two
//! names stand, the second is the older one, still read.

/// Owning Configuration of a Revision.
pub const CONFIGURATION: &str = "serving.knative.dev/configuration";
/// Generation of the Configuration that made the Revision.
pub const CONFIGURATION_GENERATION: &str = "serving.knative.dev/configurationGeneration";
/// UID of the owning Configuration.
pub const CONFIGURATION_UID: &str = "serving.knative.dev/configurationUID";
/// Owning Service.
pub const SERVICE: &str = "serving.knative.dev/service";
/// UID of the owning Service.
pub const SERVICE_UID: &str = "serving.knative.dev/serviceUID";
/// The Revision a pod serves.
pub const REVISION: &str = "serving.knative.dev/revision";
/// UID of that Revision.
pub const REVISION_UID: &str = "serving.knative.dev/revisionUID";
/// The Route a placeholder Service belongs to.
pub const ROUTE: &str = "serving.knative.dev/route";
/// Namespace of that Route.
pub const ROUTE_NAMESPACE: &str = "serving.knative.dev/routeNamespace";
/// UID of the DomainMapping an object was made for.
pub const DOMAIN_MAPPING_UID: &str = "serving.knative.dev/domainMappingUID";
/// Namespace of that DomainMapping.
pub const DOMAIN_MAPPING_NAMESPACE: &str = "serving.knative.dev/domainMappingNamespace";
/// `pending`, `active` or `reserve`: whether a Route leads to the Revision.
pub const ROUTING_STATE: &str = "serving.knative.dev/routingState";
/// When the routing state changed last.
pub const ROUTING_STATE_MODIFIED: &str = "serving.knative.dev/routingStateModified";
/// Routes that name the object.
pub const ROUTES: &str = "serving.knative.dev/routes";
/// When a Route last pinned the Revision; no longer written.
pub const LAST_PINNED: &str = "serving.knative.dev/lastPinned";
/// Keeps a Revision from being collected.
pub const NO_GC: &str = "serving.knative.dev/no-gc";
/// Who made the object.
pub const CREATOR: &str = "serving.knative.dev/creator";
/// Who changed its spec last.
pub const LAST_MODIFIER: &str = "serving.knative.dev/lastModifier";
/// Hash of what a Deployment was made from.
pub const DEPLOYMENT_HASH: &str = "serving.knative.dev/deployment-hash";
/// Seconds a gradual rollout takes.
pub const ROLLOUT_DURATION: [&str; 2] =
    ["serving.knative.dev/rollout-duration", "serving.knative.dev/rolloutDuration"];
/// How long a start may take.
pub const PROGRESS_DEADLINE: [&str; 2] =
    ["serving.knative.dev/progress-deadline", "serving.knative.dev/progressDeadline"];
/// Set to `cluster-local` it hides the service from outside.
pub const VISIBILITY: &str = "networking.knative.dev/visibility";
/// `enabled` or `redirected`: what plain HTTP from outside gets.
pub const HTTP_PROTOCOL: [&str; 3] = [
    "networking.knative.dev/http-protocol",
    "networking.knative.dev/httpProtocol",
    "networking.knative.dev/httpOption",
];
/// Which implementation serves the Route's names.
pub const INGRESS_CLASS: [&str; 2] =
    ["networking.knative.dev/ingress-class", "networking.knative.dev/ingress.class"];
/// Which implementation makes certificates.
pub const CERTIFICATE_CLASS: [&str; 2] =
    ["networking.knative.dev/certificate-class", "networking.knative.dev/certificate.class"];
/// Switches TLS from outside off for one Route.
pub const DISABLE_EXTERNAL_DOMAIN_TLS: [&str; 3] = [
    "networking.knative.dev/disable-external-domain-tls",
    "networking.knative.dev/disable-auto-tls",
    "networking.knative.dev/disableAutoTLS",
];
/// `direct` or `activator`: the way of new connections, whatever the path rule says.
pub const PATH: &str = "rouse.dev/path";
/// On a Route: the addresses and ports its names hold, so that they survive a restart.
pub const ALLOTTED: &str = "rouse.dev/allotted";
/// On a Revision: its initial scale was reached once.
pub const REACHED: &str = "rouse.dev/initial-scale-reached";

/// Whether a label or annotation of a Revision was the user's, and not put there by the controller.
pub fn is_users(name: &str) -> bool {
    let theirs = [PROGRESS_DEADLINE[0], PROGRESS_DEADLINE[1], NO_GC];
    let ours = name.starts_with("serving.knative.dev/") || name == REACHED;
    let written = name == crate::kube::cache::APPLIED;
    theirs.contains(&name) || !(ours || written)
}
