//! Shell: the Identity service, which issues a certificate for a service account token.
//!
//! | file | content |
//! |---|---|
//! | [`token_review`] | Pure: result of a TokenReview → identity for a certificate |
//! | [`rotation`] | Pure: choice of the authority that signs, and its replacement |
//! | [`signing`] | Shell: keys and certificates |
//! | [`authority_store`] | Shell: authorities in the cluster, the controller's own certificate |
//! | [`cluster_api`] | Shell: TokenReview, Secret and ConfigMap |
//! | [`local_schedule`] | Pure: certificates for names inside the cluster that are to be signed |
//! | [`refresh_rounds`] | Pure: times and results of the rounds over their authorities |
//! | [`local_signer`] | Shell: these certificates, and the authority of their own |
//!
//! A request needs no certificate, so everything about it is bounded: its size, the number of reviews at once, and the
//! time of the API server. A refusal states its reason, and nothing about what would be accepted.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use common::{
    link::TlsAdmission,
    tls::accept::AcceptLimits,
    wire::raw::{
        IssueReply, IssueRequest,
        identity_server::{Identity, IdentityServer},
    },
};
use tokio::{sync::Semaphore, time::timeout};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

pub mod authority_store;
pub mod cluster_api;
pub mod local_schedule;
pub mod local_signer;
pub mod refresh_rounds;
pub mod rotation;
pub mod signing;
pub mod token_review;

use authority_store::{AuthorityManager, AuthorityStoreError};
use token_review::TokenReviewResult;

/// Longest token in bytes; a projected token is a JWT of about 1 KiB.
const MAX_TOKEN_BYTES: usize = 8 << 10;
/// Longest certificate request in bytes; one for a P-256 key has about 300.
const MAX_REQUEST_BYTES: usize = 2 << 10;
/// Longest message in bytes: token, request and protobuf. Longer ones are not decoded.
const MAX_MESSAGE_BYTES: usize = MAX_TOKEN_BYTES + MAX_REQUEST_BYTES + 1_024;
/// Greatest number of TokenReviews at once.
const MAX_CONCURRENT_REVIEWS: usize = 16;
/// Longest wait for a free review, and then for the API server.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(5);

/// Source of reviews of service account tokens.
#[tonic::async_trait]
pub trait TokenReviewer: Send + Sync + std::fmt::Debug {
    /// Reviews a token: the account and pod that it belongs to, according to the API server.
    async fn review(&self, token: &str) -> Result<TokenReviewResult, AuthorityStoreError>;
}

/// Issuer of certificates for components.
#[derive(Debug)]
pub struct CertificateIssuer {
    authority_manager: Arc<AuthorityManager>,
    token_reviewer: Arc<dyn TokenReviewer>,
    namespace: String,
    review_permits: Semaphore,
}

impl CertificateIssuer {
    /// Creates an issuer for the components that run in `namespace`.
    pub fn new(
        authority_manager: Arc<AuthorityManager>,
        reviewer: Arc<dyn TokenReviewer>,
        namespace: &str,
    ) -> Arc<Self> {
        Arc::new(Self {
            authority_manager,
            token_reviewer: reviewer,
            namespace: namespace.to_owned(),
            review_permits: Semaphore::new(MAX_CONCURRENT_REVIEWS),
        })
    }

    /// The gRPC service, with its limit of the message size.
    pub fn grpc_service(self: &Arc<Self>) -> IdentityServer<IdentityGrpcService> {
        let service = IdentityServer::new(IdentityGrpcService(Arc::clone(self)));
        service.max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    /// Admission rule for connections: peers without a certificate are admitted too.
    pub fn tls_admission(&self) -> TlsAdmission {
        let credentials = Arc::clone(self.authority_manager.credentials());
        TlsAdmission {
            credentials,
            allows_anonymous: true,
            limits: AcceptLimits::default(),
            known_addresses: None,
        }
    }

    /// Reviews the token, and signs a certificate for the key in the request.
    async fn issue(&self, request: IssueRequest) -> Result<IssueReply, Status> {
        // The limit of the message does not bound its two parts, and the token goes on to the API server.
        if request.token.len() > MAX_TOKEN_BYTES || request.request.len() > MAX_REQUEST_BYTES {
            return Err(Status::invalid_argument("token or request is too large"));
        }
        // Before the review: without an authority its result would be of no use.
        let signing = self.authority_manager.signing();
        let signing = signing.ok_or_else(|| Status::unavailable("no authority yet: try again"))?;
        // Any peer may invent tokens, and must not flood the API server with them.
        let permit = timeout(REVIEW_TIMEOUT, self.review_permits.acquire()).await;
        let _permit =
            permit.map_err(|_elapsed| Status::resource_exhausted("too many ask: try again"))?;
        let review = timeout(REVIEW_TIMEOUT, self.token_reviewer.review(&request.token)).await;
        let review = review.unwrap_or_else(|_elapsed| Err("the API server did not answer".into()));
        let reviewed = review.map_err(|error| {
            warn!(error, "token not reviewed");
            Status::unavailable("the token could not be reviewed: try again")
        })?;
        let identity =
            token_review::identity_of_token(&reviewed, &self.namespace).map_err(|refusal| {
                warn!(%refusal, "certificate refused");
                Status::unauthenticated(refusal.to_string())
            })?;
        let signed = signing.signer.sign_request(&request.request, &identity, SystemTime::now());
        // rcgen's error is for the log only: a caller cannot act on its details.
        let (certificate, end) = signed.map_err(|error| {
            warn!(%identity, error = %common::link::error_chain(&error), "request refused");
            Status::invalid_argument("the request holds no key that could be signed")
        })?;
        info!(%identity, "certificate issued");
        let end = end.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        Ok(IssueReply {
            chain: vec![certificate.to_vec()],
            authorities: signing.authorities.iter().map(|it| it.to_vec()).collect(),
            not_after_ms: u64::try_from(end).unwrap_or(u64::MAX),
        })
    }
}

/// The gRPC service of a [`CertificateIssuer`].
#[derive(Debug)]
pub struct IdentityGrpcService(Arc<CertificateIssuer>);

#[tonic::async_trait]
impl Identity for IdentityGrpcService {
    async fn issue(&self, request: Request<IssueRequest>) -> Result<Response<IssueReply>, Status> {
        self.0.issue(request.into_inner()).await.map(Response::new)
    }
}

#[cfg(test)]
mod tests;
