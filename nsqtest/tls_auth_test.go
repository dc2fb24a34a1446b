package nsqtest

import (
	"crypto/tls"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// upgrade negotiates TLS. The handshake's error is returned, as is that of the first frame: in TLS 1.3, a server's refusal of
// the client's certificate comes after the handshake.
func upgrade(t *testing.T, addr string, config *tls.Config) (*wire, error) {
	t.Helper()
	w := dialWire(t, addr)
	w.identify(t, map[string]any{"feature_negotiation": true, "tls_v1": true})
	require.Contains(t, w.mustFrame(t), `"tls_v1":true`)
	config.ServerName = "127.0.0.1"
	secure := newWire(t, tls.Client(w.Conn, config))
	ok, err := secure.frame()
	if err == nil {
		require.Equal(t, "OK", ok)
	}
	return secure, err
}

func TestTLS(t *testing.T) {
	certs, others := TempCertificates(t), TempCertificates(t)
	tests := map[string]struct {
		policy string
		config *tls.Config
		works  bool
	}{
		"no policy, no certificate":                  {"", certs.AnonymousConfig(), true},
		"unknown CA":                                 {"", others.AnonymousConfig(), false},
		"require, no certificate":                    {"require", certs.AnonymousConfig(), false},
		"require, any certificate":                   {"require", withClientOf(certs, others), true},
		"require-verify, certificate of the CA":      {"require-verify", certs.ClientConfig(), true},
		"require-verify, certificate of another one": {"require-verify", withClientOf(certs, others), false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			n := StartNSQD(t, NSQDOptions{Certificates: certs, TLSClientAuth: test.policy})
			w, err := upgrade(t, n.TCPAddr(), test.config)
			if !test.works {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			require.NoError(t, n.Publish("events", []byte("one")), "HTTP stays plain")
			w.subscribe(t, "events", "archive", 1)
			_, body := w.message(t)
			require.Equal(t, "one", body)
			s, err := n.ChannelStats("events", "archive")
			require.NoError(t, err)
			require.True(t, s.Clients[0].TLS)
		})
	}
}

// withClientOf trusts the CA of one and shows the client certificate of the other.
func withClientOf(certs, others *Certificates) *tls.Config {
	config := certs.AnonymousConfig()
	// Not Certificates: a client doesn't show those that the server's list of CAs rules out.
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		return &others.client, nil
	}
	return config
}

func TestTLSRequired(t *testing.T) {
	n := StartNSQD(t, NSQDOptions{Certificates: TempCertificates(t), TLSRequired: true})
	w := dialWire(t, n.TCPAddr())
	w.send(t, "SUB events archive\n")
	require.Contains(t, w.mustFrame(t), "E_INVALID")
}

func TestTLSOfProcess(t *testing.T) {
	certs := TempCertificates(t)
	p := StartNSQDProcess(t, NSQDOptions{Certificates: certs, TLSClientAuth: "require-verify"})
	_, err := upgrade(t, p.TCPAddr(), certs.ClientConfig())
	require.NoError(t, err)
	require.NoError(t, p.CreateTopic("events"), "HTTP stays plain")
}

func TestCertificatesNeedTheirDirectory(t *testing.T) {
	_, err := NewCertificates("testdata/missing")
	require.Error(t, err)
}

func authenticate(t *testing.T, n *NSQD, secret string) (*wire, string) {
	t.Helper()
	w := dialWire(t, n.TCPAddr())
	w.sendBody(t, "AUTH", []byte(secret))
	return w, w.mustFrame(t)
}

func TestAuth(t *testing.T) {
	a := StartAuthServer(t,
		Grant{Secret: "all", Identity: "me", IdentityURL: "about:me"},
		Grant{Secret: "reader", Topic: "^events$", Channels: []string{"^archive$"}, Permissions: []string{"subscribe"}},
		Grant{Secret: "nobody", NoRights: true},
	)
	n := StartNSQD(t, NSQDOptions{AuthHTTPAddresses: []string{a.Addr()}})

	w := dialWire(t, n.TCPAddr())
	w.send(t, "SUB events archive\n")
	require.Contains(t, w.mustFrame(t), "E_AUTH_FIRST")

	w, answer := authenticate(t, n, "all")
	require.JSONEq(t, `{"identity":"me","identity_url":"about:me","permission_count":1}`, answer)
	w.subscribe(t, "events", "archive", 1)
	s, err := n.ChannelStats("events", "archive")
	require.NoError(t, err)
	require.True(t, s.Clients[0].Authed)
	require.Equal(t, "me", s.Clients[0].AuthIdentity)

	w, _ = authenticate(t, n, "reader")
	w.subscribe(t, "events", "archive", 1)
	w.sendBody(t, "PUB events", []byte("x"))
	require.Contains(t, w.mustFrame(t), "E_UNAUTHORIZED")
	w, _ = authenticate(t, n, "reader")
	w.send(t, "SUB others archive\n")
	require.Contains(t, w.mustFrame(t), "E_UNAUTHORIZED")

	_, answer = authenticate(t, n, "nobody")
	require.Contains(t, answer, "E_UNAUTHORIZED")
	_, answer = authenticate(t, n, "guess")
	require.Contains(t, answer, "E_AUTH_FAILED")
	require.Contains(t, a.Requests(), AuthRequest{Secret: "guess", RemoteIP: "127.0.0.1"})
}

func TestAuthChanges(t *testing.T) {
	a := StartAuthServer(t, Grant{Secret: "s", TTL: time.Second})
	n := StartNSQD(t, NSQDOptions{AuthHTTPAddresses: []string{a.Addr()}})
	_, answer := authenticate(t, n, "s")
	require.Contains(t, answer, `"permission_count":1`)

	a.Refuse(true)
	_, answer = authenticate(t, n, "s")
	require.Contains(t, answer, "E_AUTH_FAILED")
	a.Refuse(false)
	_, answer = authenticate(t, n, "s")
	require.Contains(t, answer, `"permission_count":1`)

	a.SetGrants()
	_, answer = authenticate(t, n, "s")
	require.Contains(t, answer, "E_AUTH_FAILED")
	require.NoError(t, a.Close())
	require.NoError(t, a.Close(), "a second time")
}
