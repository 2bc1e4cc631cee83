//! Pure: features of the Gateway API that Rouse has, by the names of upstream's conformance tests.

/// Supported features, in the order of their names. `docs/gateway-api.md` has the reasons for those that are missing.
pub(super) const SUPPORTED_FEATURES: [&str; 24] = [
    "GRPCRoute",
    "GRPCRouteNamedRouteRule",
    "Gateway",
    "GatewayHTTPListenerIsolation",
    "HTTPRoute",
    "HTTPRoute303RedirectStatusCode",
    "HTTPRoute307RedirectStatusCode",
    "HTTPRoute308RedirectStatusCode",
    "HTTPRouteBackendProtocolH2C",
    "HTTPRouteBackendProtocolWebSocket",
    "HTTPRouteBackendRequestHeaderModification",
    "HTTPRouteBackendTimeout",
    "HTTPRouteHostRewrite",
    "HTTPRouteMethodMatching",
    "HTTPRouteNamedRouteRule",
    "HTTPRouteParentRefPort",
    "HTTPRoutePathRedirect",
    "HTTPRoutePathRewrite",
    "HTTPRoutePortRedirect",
    "HTTPRouteQueryParamMatching",
    "HTTPRouteRequestTimeout",
    "HTTPRouteResponseHeaderModification",
    "HTTPRouteSchemeRedirect",
    "ReferenceGrant",
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The API asks for this order.
    #[test]
    fn features_are_sorted_by_their_names() {
        assert!(SUPPORTED_FEATURES.is_sorted_by(|one, next| one < next));
    }
}
