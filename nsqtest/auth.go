package nsqtest

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

// Grant is what one secret allows. Several grants may have the same secret: their rights add up, and the first one's
// identity and TTL are used.
type Grant struct {
	Secret      string
	Identity    string        // shown in nsqd's answer and stats
	IdentityURL string        // same
	TTL         time.Duration // how long nsqd may go on without asking again, in whole seconds; default 1h
	Topic       string        // regular expression; default all
	Channels    []string      // regular expressions; default all
	Permissions []string      // "subscribe", "publish"; default both
	NoRights    bool          // the secret is known and allows nothing: nsqd answers E_UNAUTHORIZED, not E_AUTH_FAILED
}

// AuthRequest is a question of nsqd to the auth server.
type AuthRequest struct {
	Secret     string
	RemoteIP   string // of nsqd's client
	TLS        bool   // whether the client uses TLS
	CommonName string // of its certificate
}

// AuthServer answers the questions of nsqds about AUTH secrets. A secret without a grant is refused. Its methods may be called
// from several goroutines.
type AuthServer struct {
	addr   string
	server *http.Server
	done   chan struct{} // closed when the server's goroutine has ended

	mu       sync.Mutex // guards the fields below
	grants   []Grant
	refusing bool
	requests []AuthRequest
}

// StartAuthServer starts an auth server that is stopped when the test ends; a failure ends the test. Give its Addr to
// [NSQDOptions].AuthHTTPAddresses.
func StartAuthServer(tb TB, grants ...Grant) *AuthServer {
	tb.Helper()
	a, err := NewAuthServer(grants...)
	if err != nil {
		tb.Fatalf("%v", err)
		return nil
	}
	closeAfter(tb, "auth server", a.Close)
	return a
}

// NewAuthServer starts an auth server, which runs until Close.
func NewAuthServer(grants ...Grant) (*AuthServer, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("nsqtest: auth server: %w", err)
	}
	a := &AuthServer{addr: listener.Addr().String(), done: make(chan struct{}), grants: slices.Clone(grants)}
	a.server = &http.Server{Handler: a, ReadHeaderTimeout: requestTimeout}
	// nsqd takes a new connection for each question, and leaves it open.
	a.server.SetKeepAlivesEnabled(false)
	go func() {
		defer close(a.done)
		a.server.Serve(listener)
	}()
	return a, nil
}

// Addr returns the server's "host:port".
func (a *AuthServer) Addr() string { return a.addr }

// SetGrants replaces all grants. nsqd asks again once the TTL of what it knows has passed.
func (a *AuthServer) SetGrants(grants ...Grant) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.grants = slices.Clone(grants)
}

// Refuse makes the server refuse everybody, as one that is out of order does, or end that.
func (a *AuthServer) Refuse(refuse bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refusing = refuse
}

// Requests returns what has been asked so far, oldest first.
func (a *AuthServer) Requests() []AuthRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.requests)
}

// Close stops the server, with the requests it is answering. It may be called twice.
func (a *AuthServer) Close() error {
	err := a.server.Close()
	<-a.done
	return err
}

// ServeHTTP answers nsqd's GET /auth.
func (a *AuthServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	grants := a.ask(AuthRequest{
		Secret:     query.Get("secret"),
		RemoteIP:   query.Get("remote_ip"),
		TLS:        query.Get("tls") == "true",
		CommonName: query.Get("common_name"),
	})
	if len(grants) == 0 {
		http.Error(w, `{"message":"NOT_AUTHORIZED"}`, http.StatusForbidden)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(newAuthAnswer(grants))
}

// ask notes a request and returns the grants for its secret.
func (a *AuthServer) ask(request AuthRequest) []Grant {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.requests = append(a.requests, request)
	if a.refusing {
		return nil
	}
	var grants []Grant
	for _, g := range a.grants {
		if g.Secret == request.Secret {
			grants = append(grants, g)
		}
	}
	return grants
}

// authAnswer is the document that nsqd expects.
type authAnswer struct {
	TTL            int             `json:"ttl"` // seconds
	Identity       string          `json:"identity"`
	IdentityURL    string          `json:"identity_url"`
	Authorizations []authorization `json:"authorizations"`
}

type authorization struct {
	Topic       string   `json:"topic"`
	Channels    []string `json:"channels"`
	Permissions []string `json:"permissions"`
}

const defaultAuthTTL = time.Hour

func newAuthAnswer(grants []Grant) authAnswer {
	ttl := defaultAuthTTL
	set(&ttl, grants[0].TTL)
	answer := authAnswer{
		TTL:            max(1, int(ttl/time.Second)),
		Identity:       grants[0].Identity,
		IdentityURL:    grants[0].IdentityURL,
		Authorizations: []authorization{},
	}
	for _, g := range grants {
		if !g.NoRights {
			answer.Authorizations = append(answer.Authorizations, g.authorization())
		}
	}
	return answer
}

func (g Grant) authorization() authorization {
	rights := authorization{
		Topic:       ".*",
		Channels:    []string{".*"},
		Permissions: []string{"subscribe", "publish"},
	}
	set(&rights.Topic, g.Topic)
	if g.Channels != nil {
		rights.Channels = g.Channels
	}
	if g.Permissions != nil {
		rights.Permissions = g.Permissions
	}
	return rights
}
