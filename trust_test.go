package nsq

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// certFiles writes the fakes' certificate and key, as files for options.
func certFiles(t *testing.T) (cert, key string) {
	t.Helper()
	cert, key = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	require.NoError(t, os.WriteFile(cert, fakeCert().certPEM, 0o600))
	require.NoError(t, os.WriteFile(key, fakeCert().keyPEM, 0o600))
	return cert, key
}

// set gives a config options by name.
func (opts tlsOptionSet) set(t *testing.T, cfg *Config) {
	t.Helper()
	for name, value := range opts {
		require.NoError(t, cfg.Set(name, value))
	}
}

type tlsOptionSet map[string]any

// Security: TLS 1.2 is the least unless somebody asks for less, however the TLS config came about.
func TestTLSVersions(t *testing.T) {
	t.Parallel()
	ca, _ := certFiles(t)
	ways := map[string]func(t *testing.T, cfg *Config){
		"by the tls.Config":  func(_ *testing.T, cfg *Config) { cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool} },
		"by options":         func(t *testing.T, cfg *Config) { tlsOptionSet{"tls_root_ca_file": ca}.set(t, cfg) },
		"without a config":   func(_ *testing.T, cfg *Config) {},
		"without any checks": func(t *testing.T, cfg *Config) { tlsOptionSet{"tls_insecure_skip_verify": true}.set(t, cfg) },
	}
	for way, tune := range ways {
		for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11, tls.VersionTLS12, tls.VersionTLS13} {
			for _, asked := range []string{"", "tls1.0", "tls1.3"} {
				t.Run(way+", nsqd has "+tls.VersionName(version)+", asked for "+asked, func(t *testing.T) {
					inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
						var got uint16
						n.set(func(b *fakeBehaviour) {
							b.tls, b.authSecret = true, "s3cret"
							b.tlsConfig = &tls.Config{
								MinVersion: version, MaxVersion: version, Certificates: []tls.Certificate{fakeCert().pair},
								VerifyConnection: func(s tls.ConnectionState) error { got = s.Version; return nil },
							}
						})
						r := unconnected(t, n, func(cfg *Config) {
							cfg.TlsV1, cfg.AuthSecret = true, "s3cret"
							tune(t, cfg)
							if asked != "" {
								require.NoError(t, cfg.Set("tls_min_version", asked))
							}
						})
						err := r.ConnectToNSQD(n.addr)
						synctest.Wait()
						least := map[string]uint16{"": tls.VersionTLS12, "tls1.0": tls.VersionTLS10, "tls1.3": tls.VersionTLS13}[asked]
						switch {
						case version < least:
							require.ErrorContains(t, err, "protocol version")
							require.Equal(t, []string{"IDENTIFY"}, n.commands())
						case way == "without a config": // nobody vouches for the fake
							var unknown x509.UnknownAuthorityError
							require.ErrorAs(t, err, &unknown)
							require.Equal(t, []string{"IDENTIFY"}, n.commands())
						default:
							require.NoError(t, err)
							require.Equal(t, version, got)
						}
					})
				})
			}
		}
	}
}

// Security: a private CA counts, and is needed. A client certificate is shown to who asks for it.
func TestPrivateCAsAndClientCertificates(t *testing.T) {
	cert, key := certFiles(t)
	otherCA, _ := newCertificate(t, "another CA")
	for name, test := range map[string]struct {
		options tlsOptionSet
		demand  bool // nsqd wants a client certificate
		err     string
	}{
		"CA by file":                          {options: tlsOptionSet{"tls_root_ca_file": cert}},
		"no CA":                               {options: tlsOptionSet{}, err: "unknown authority"},
		"another CA":                          {options: tlsOptionSet{"tls_root_ca_file": otherCA}, err: "unknown authority"},
		"client certificate by files":         {options: tlsOptionSet{"tls_root_ca_file": cert, "tls_cert": cert, "tls_key": key}, demand: true},
		"client certificate missing":          {options: tlsOptionSet{"tls_root_ca_file": cert}, demand: true, err: "certificate required"},
		"client certificate nobody asks for":  {options: tlsOptionSet{"tls_root_ca_file": cert, "tls_cert": cert, "tls_key": key}},
		"a client certificate is no CA":       {options: tlsOptionSet{"tls_cert": cert, "tls_key": key}, demand: true, err: "unknown authority"},
		"no verification, if that is the ask": {options: tlsOptionSet{"tls_insecure_skip_verify": "true"}},
	} {
		t.Run(name, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				shown := 0
				n.set(func(b *fakeBehaviour) {
					b.tls = true
					b.tlsConfig = &tls.Config{
						Certificates: []tls.Certificate{fakeCert().pair},
						VerifyConnection: func(s tls.ConnectionState) error {
							shown = len(s.PeerCertificates)
							return nil
						},
					}
					if test.demand {
						b.tlsConfig.ClientAuth, b.tlsConfig.ClientCAs = tls.RequireAndVerifyClientCert, fakeCert().pool
					}
				})
				r := unconnected(t, n, func(cfg *Config) {
					test.options.set(t, cfg)
					cfg.TlsV1 = true
				})
				err := r.ConnectToNSQD(n.addr)
				synctest.Wait()
				if test.err != "" {
					require.ErrorContains(t, err, test.err)
					require.NotContains(t, n.commands(), "SUB t c")
					require.Zero(t, n.cluster.openConns())
					return
				}
				require.NoError(t, err)
				require.Equal(t, test.demand, shown > 0)
				n.publishN(3)
				synctest.Wait()
				require.Equal(t, 3, n.stats().Finished)
			})
		})
	}
}

// Security: with TLS asked for, nothing but IDENTIFY ever goes in clear, also when nsqd comes back without TLS.
func TestNoDowngrade(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		n.set(func(b *fakeBehaviour) { b.tls, b.authSecret = true, secretToken })
		var conns []*recordedConn
		r := unconnected(t, n, func(cfg *Config) {
			cfg.TlsV1, cfg.AuthSecret = true, secretToken
			cfg.TlsConfig = &tls.Config{RootCAs: fakeCert().pool}
			cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
				nc, err := n.cluster.Dial(ctx, network, addr)
				conns = append(conns, &recordedConn{Conn: nc})
				return conns[len(conns)-1], err
			}
		})
		require.NoError(t, r.ConnectToNSQD(n.addr))
		n.publishN(3)
		synctest.Wait()
		require.Equal(t, 3, n.stats().Finished)

		n.set(func(b *fakeBehaviour) { b.tls = false })
		n.dropAll()
		time.Sleep(10 * time.Minute)
		require.Equal(t, NodeWaiting, r.Status().NSQDs[0].State)
		require.ErrorIs(t, r.Status().NSQDs[0].LastError, ErrTLSRefused)
		require.Greater(t, len(conns), 10)
		for i, c := range conns {
			rest, ok := bytes.CutPrefix(c.bytes(), []byte("  V2IDENTIFY\n"))
			require.True(t, ok)
			end := bytes.IndexByte(rest, '}') + 1
			if i > 0 {
				require.Len(t, rest, end, "nothing follows in clear")
			}
			for _, text := range []string{secretToken, "AUTH", "SUB", "RDY"} {
				require.NotContains(t, string(rest[end:]), text)
			}
			require.NotContains(t, string(rest[:end]), secretToken)
		}

		n.set(func(b *fakeBehaviour) { b.tls = true })
		time.Sleep(time.Minute)
		require.Equal(t, NodeConnected, r.Status().NSQDs[0].State, "and when TLS is back, so is the connection")
	})
}

// One tls.Config serves many connections, each with the name of its own nsqd.
func TestOneTLSConfigForManyConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		addrs := []string{"nsqd-1:4150", "nsqd-2:4150", "nsqd-3:4150", "nsqd-4:4150", "nsqd-5:4150", "localhost:4150", "127.0.0.1:4150"}
		cluster := newFakeCluster(t, append(addrs, "stranger:4150")...)
		for _, addr := range append(addrs, "stranger:4150") {
			cluster.nsqd(addr).set(func(b *fakeBehaviour) { b.tls = true })
		}
		shared := &tls.Config{RootCAs: fakeCert().pool}
		for range 2 {
			r := newTestConsumer(t, cluster, func(cfg *Config) { cfg.TlsV1, cfg.TlsConfig, cfg.MaxInFlight = true, shared, 10 })
			r.AddHandler(nopHandler)
			defer stopConsumer(t, r, time.Minute)
			require.NoError(t, r.ConnectToNSQDs(addrs))
			var wrong x509.HostnameError
			require.ErrorAs(t, r.ConnectToNSQD("stranger:4150"), &wrong)
		}
		require.Empty(t, shared.ServerName)
	})
}

// certificateFor makes a certificate that is its own authority.
func certificateFor(t *testing.T, names []string, ips ...net.IP) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"}, DNSNames: names, IPAddresses: ips,
		NotBefore: time.Date(1990, 1, 1, 0, 0, 0, 0, time.UTC), NotAfter: time.Date(2090, 1, 1, 0, 0, 0, 0, time.UTC),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}

// What a certificate is verified against: the host of the address in the form that certificates have.
func TestCertificateOfAnAddress(t *testing.T) {
	for addr, ok := range map[string]bool{
		"[fe80::1]:4150":      true,
		"[fe80::1%eth0]:4150": true, // a zone is this machine's own matter
		"[fe80::2%eth0]:4150": false,
		"10.1.2.3:4150":       true,
		"10.1.2.4:4150":       false,
		"a.example.:4150":     true,
		"A.Example:4150":      true,
		"b.example:4150":      false,
	} {
		t.Run(addr, func(t *testing.T) {
			inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
				pair, pool := certificateFor(t, []string{"a.example"}, net.ParseIP("fe80::1"), net.IPv4(10, 1, 2, 3))
				n.set(func(b *fakeBehaviour) {
					b.tls, b.tlsConfig = true, &tls.Config{Certificates: []tls.Certificate{pair}}
				})
				r := unconnected(t, n, func(cfg *Config) {
					cfg.TlsV1, cfg.TlsConfig = true, &tls.Config{RootCAs: pool}
					cfg.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
						return n.cluster.Dial(ctx, network, n.addr)
					}
				})
				err := r.ConnectToNSQD(addr)
				if ok {
					require.NoError(t, err)
					return
				}
				var wrong x509.HostnameError
				require.ErrorAs(t, err, &wrong)
			})
		})
	}
}

// A certificate has texts that the peer chose; in an error or a log line they are no line of their own.
func TestCertificatesForgeNoLogLines(t *testing.T) {
	inFakeBubble(t, func(t *testing.T, n *fakeNSQD) {
		pair, pool := certificateFor(t, []string{"evil\nERR    1 [t/c] forged"})
		r := unconnected(t, n, func(cfg *Config) { cfg.TlsV1, cfg.TlsConfig = true, &tls.Config{RootCAs: pool} })
		log := logTo(r)
		n.set(func(b *fakeBehaviour) { b.tls = true })
		require.Error(t, r.ConnectToNSQD(n.addr))
		r.mu.Lock()
		r.nodes[n.addr].connectedOnce = true // so that failures are logged
		r.mu.Unlock()
		n.set(func(b *fakeBehaviour) { b.tlsConfig = &tls.Config{Certificates: []tls.Certificate{pair}} })
		err := r.ConnectToNSQD(n.addr)
		require.ErrorContains(t, err, "evil")
		require.NotContains(t, err.Error(), "\n")
		synctest.Wait()
		require.NotEmpty(t, log.matching("(WRN|ERR)", `.*evil`))
		for _, line := range log.all() {
			require.Equal(t, 1, strings.Count(line, "[t/c]")-strings.Count(line, `\nERR    1 [t/c]`), line)
			require.NotContains(t, line, "\n")
		}
	})
}
