//! Pure: keys of labels and annotations: those that Knative defines, and those of Rouse (`rouse.dev/`).
//!
//! Sources: knative/serving `pkg/apis/serving/register.go`, knative/networking `pkg/apis/networking/register.go`. Where
//! a constant has several keys, the later ones are older spellings that are still read.

use crate::model::object::hash::APPLIED_ANNOTATION;

/// Name of the Configuration that owns the Revision.
pub const CONFIGURATION: &str = "serving.knative.dev/configuration";
/// Generation of the Configuration from which the Revision was made.
pub const CONFIGURATION_GENERATION: &str = "serving.knative.dev/configurationGeneration";
/// UID of the Configuration that owns the Revision.
pub const CONFIGURATION_UID: &str = "serving.knative.dev/configurationUID";
/// Name of the Service that owns the object.
pub const SERVICE: &str = "serving.knative.dev/service";
/// UID of the Service that owns the object.
pub const SERVICE_UID: &str = "serving.knative.dev/serviceUID";
/// Name of the Revision that a pod serves.
pub const REVISION: &str = "serving.knative.dev/revision";
/// UID of the Revision that a pod serves.
pub const REVISION_UID: &str = "serving.knative.dev/revisionUID";
/// Name of the Route that a placeholder Service belongs to.
pub const ROUTE: &str = "serving.knative.dev/route";
/// Namespace of the Route that a placeholder Service belongs to.
pub const ROUTE_NAMESPACE: &str = "serving.knative.dev/routeNamespace";
/// UID of the DomainMapping that an object was made for.
pub const DOMAIN_MAPPING_UID: &str = "serving.knative.dev/domainMappingUID";
/// Namespace of the DomainMapping that an object was made for.
pub const DOMAIN_MAPPING_NAMESPACE: &str = "serving.knative.dev/domainMappingNamespace";
/// Routing state of a Revision: `pending`, `active` (a Route names it) or `reserve`.
pub const ROUTING_STATE: &str = "serving.knative.dev/routingState";
/// Time of the last change of the routing state.
pub const ROUTING_STATE_MODIFIED: &str = "serving.knative.dev/routingStateModified";
/// Names of the Routes that refer to the object.
pub const ROUTES: &str = "serving.knative.dev/routes";
/// Time at which a Route last pinned the Revision; no longer written.
pub const LAST_PINNED: &str = "serving.knative.dev/lastPinned";
/// Exempts a Revision from garbage collection.
pub const NO_GC: &str = "serving.knative.dev/no-gc";
/// User who created the object.
pub const CREATOR: &str = "serving.knative.dev/creator";
/// User who last changed the object's spec.
pub const LAST_MODIFIER: &str = "serving.knative.dev/lastModifier";
/// Hash of the inputs of a Deployment.
pub const DEPLOYMENT_HASH: &str = "serving.knative.dev/deployment-hash";
/// Duration of a gradual rollout, in seconds.
pub const ROLLOUT_DURATION: [&str; 2] =
    ["serving.knative.dev/rollout-duration", "serving.knative.dev/rolloutDuration"];
/// Deadline for a Revision's first start.
pub const PROGRESS_DEADLINE: [&str; 2] =
    ["serving.knative.dev/progress-deadline", "serving.knative.dev/progressDeadline"];
/// Visibility of a service: `cluster-local` hides it from outside.
pub const VISIBILITY: &str = "networking.knative.dev/visibility";
/// Treatment of plain HTTP from outside: `enabled` or `redirected`.
pub const HTTP_PROTOCOL: [&str; 3] = [
    "networking.knative.dev/http-protocol",
    "networking.knative.dev/httpProtocol",
    "networking.knative.dev/httpOption",
];
/// Ingress implementation that serves the Route's names.
pub const INGRESS_CLASS: [&str; 2] =
    ["networking.knative.dev/ingress-class", "networking.knative.dev/ingress.class"];
/// Class on Ingresses, in the spelling that controllers of ingresses read.
pub const CLASS_OF_INGRESS: &str = "networking.knative.dev/ingress.class";
/// Annotation of an Ingress: hash of its spec.
pub const INGRESS_SPEC: &str = "rouse.dev/ingress-spec";
/// Annotation in a Route's status: the class in force of another ingress that fronts its public hosts.
pub const CLASS_IN_FORCE: &str = "rouse.dev/ingress-class";
/// Implementation that issues certificates.
pub const CERTIFICATE_CLASS: [&str; 2] =
    ["networking.knative.dev/certificate-class", "networking.knative.dev/certificate.class"];
/// Class on requested certificates, in the spelling that controllers of certificates read.
pub const CERTIFICATE_CLASS_OF_REQUEST: &str = "networking.knative.dev/certificate.class";
/// Use of a requested certificate, as a label: `external-domain` for hosts outside the cluster.
pub const CERTIFICATE_TYPE: &str = "networking.knative.dev/certificate-type";
/// Domain of a certificate for all hosts of a namespace, as a label.
pub const WILDCARD_DOMAIN: &str = "networking.knative.dev/wildcardDomain";
/// UID of the request, as a label of the Secret with the certificate.
pub const CERTIFICATE_UID: &str = "networking.internal.knative.dev/certificate-uid";
/// DomainMapping that an object was made for, as a label.
pub const DOMAIN_MAPPING: &str = "serving.knative.dev/domainMapping";
/// Disables TLS from outside for one Route or DomainMapping.
pub const DISABLE_EXTERNAL_DOMAIN_TLS: [&str; 3] = [
    "networking.knative.dev/disable-external-domain-tls",
    "networking.knative.dev/disable-auto-tls",
    "networking.knative.dev/disableAutoTLS",
];
/// Path of new connections, `direct` or `activator`, which overrides the autoscaler's rule.
pub const PATH: &str = "rouse.dev/path";
/// Secret of a DomainMapping's namespace with the authorities of client certificates, under `ca.crt`.
pub const CLIENT_CA: &str = "rouse.dev/client-ca";
/// Demand for certificates of a DomainMapping's clients: `require` or `optional`.
pub const CLIENT_AUTH: &str = "rouse.dev/client-auth";
/// Treatment of TLS of a DomainMapping: `passthrough` leaves it to a service of raw TCP.
pub const TLS: &str = "rouse.dev/tls";
/// Only value of [`TLS`].
pub const TLS_PASSTHROUGH: &str = "passthrough";
/// Host of a DomainMapping that is not its name: another one has that host too, or it has a wildcard.
pub const HOST: &str = "rouse.dev/host";
/// Prefix of the paths that a DomainMapping serves, in whole segments.
pub const PATH_PREFIX: &str = "rouse.dev/path-prefix";
/// Form of the path for pods: `true` takes the prefix of [`PATH_PREFIX`] out.
pub const STRIP_PREFIX: &str = "rouse.dev/strip-prefix";
/// `Strict-Transport-Security` of a DomainMapping.
pub const HSTS: &str = "rouse.dev/hsts";
/// Protocol of the pods, which counts before the name of their port: `http1`, `h2c` or `tcp`.
pub const PROTOCOL: &str = "rouse.dev/protocol";
/// Gateway port of a Route: each connection to it from outside is raw TCP for the service.
pub const GATEWAY_PORT: &str = "rouse.dev/port";
/// Annotation of the placeholder of a Route's own name: the gateway port that the Route owns. Controllers of earlier
/// releases have no other record of it.
pub const OWNED_GATEWAY_PORT: &str = "rouse.dev/gateway-port";
/// Kubernetes' annotation for hints in proportion to the CPU of the zones: `Auto` or `auto`.
pub const TOPOLOGY_MODE: &str = "service.kubernetes.io/topology-mode";
/// Retired spelling of [`TOPOLOGY_MODE`], which counts first.
pub const TOPOLOGY_AWARE_HINTS: &str = "service.kubernetes.io/topology-aware-hints";
/// Preference for near pods, with the values of the field `trafficDistribution` of a Service of Kubernetes.
pub const TRAFFIC_DISTRIBUTION: &str = "rouse.dev/traffic-distribution";
/// All annotations about hints.
pub const HINTS: [&str; 3] = [TOPOLOGY_MODE, TOPOLOGY_AWARE_HINTS, TRAFFIC_DISTRIBUTION];
/// Addresses and ports allocated to a Route's names, so that they survive a restart of the controller.
pub const ALLOCATIONS: &str = "rouse.dev/allotted";
/// Marks a Revision whose initial scale was reached once.
pub const INITIAL_SCALE_REACHED: &str = "rouse.dev/initial-scale-reached";
/// Annotation in the status of a PodAutoscaler or Revision: the decision in force, and the figures behind it.
pub(crate) const DECISION_ANNOTATION: &str = "rouse.dev/decision";
/// Annotation on a pod: its last serving address, so that a restarted controller need not wait for a report.
pub(crate) const ADDRESS_ANNOTATION: &str = "rouse.dev/address";
/// Annotation on a pod: the boot of the machine in which it was started. No pod outlives that boot.
pub(crate) const BOOT_ANNOTATION: &str = "rouse.dev/boot";
/// Annotation on a draining pod: the moment at which draining began.
pub const DRAINING: &str = "rouse.dev/draining";
/// Number of pods that stand by while a Revision sleeps: on a template, and on a namespace as its default.
pub const STANDBY: &str = "rouse.dev/standby";
/// Treatment of a frozen pod's memory: `keep` or `reclaim`.
pub const STANDBY_MEMORY: &str = "rouse.dev/standby-memory";
/// Time after which a frozen pod is ended.
pub const STANDBY_TTL: &str = "rouse.dev/standby-ttl";
/// Annotation on a pod with a standby order: the moment of the order.
pub const STANDBY_SINCE: &str = "rouse.dev/standby-since";
/// Annotation on a pod with reduced requests: the requests with which it was created, as JSON by container.
pub const ORIGINAL_REQUESTS: &str = "rouse.dev/original-requests";
/// Annotation with the service's own port number at the activators.
pub const ACTIVATOR_PORT_ANNOTATION: &str = "rouse.dev/activator-port";
/// Annotation of a Kubernetes Service that lets its workload sleep: `true` makes it a scaled Service.
pub const SCALE_TO_ZERO: &str = "rouse.dev/scale-to-zero";
/// Label of the PodAutoscaler of a scaled Service: the Service's name.
pub const SCALED_SERVICE: &str = "rouse.dev/scaled-service";
/// Annotation of the PodAutoscaler of a scaled Service: the ports at the activators, as `80=20017,5432=20018`.
pub const ACTIVATOR_PORTS: &str = "rouse.dev/activator-ports";
/// Annotation of the workload of a scaled Service: the number of pods that the controller wrote last.
pub const SCALED_TO: &str = "rouse.dev/scaled-to";
/// Annotation of the workload of a scaled Service: the number of pods that its user wants while it is awake.
pub const USER_REPLICAS: &str = "rouse.dev/replicas";
/// Annotation in the template of a scaled Service whose workload has a HorizontalPodAutoscaler. No object has it.
pub const HAS_HPA: &str = "rouse.dev/has-hpa";
/// Condition of a pod of the local node that has a standby order: `True` while the pod is frozen, as users see it.
pub const FROZEN_CONDITION: &str = "rouse.dev/frozen";

/// Returns true if the user set this label or annotation of a Revision, rather than the controller.
pub fn is_set_by_user(name: &str) -> bool {
    // Users set only these keys of the group `serving.knative.dev`.
    let is_user_key = [PROGRESS_DEADLINE[0], PROGRESS_DEADLINE[1], NO_GC].contains(&name);
    let is_controller_key = name.starts_with("serving.knative.dev/")
        || [INITIAL_SCALE_REACHED, APPLIED_ANNOTATION].contains(&name);
    is_user_key || !is_controller_key
}
