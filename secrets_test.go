package nsq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	secretToken    = "s3cret-t0ken"
	secretPassword = "passw0rd"
	secretQuery    = "quer1-t0ken"
)

// confidant keeps all that it is told.
type confidant struct {
	mu   sync.Mutex // guards told
	told []string
}

func (c *confidant) Output(_ int, s string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.told = append(c.told, s)
	return nil
}

// Write is for slog handlers.
func (c *confidant) Write(p []byte) (int, error) { return len(p), c.Output(0, string(p)) }

// hear is told values in all the ways to print them, and the errors behind errors.
func (c *confidant) hear(values ...any) {
	for _, v := range values {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d"} {
			_ = c.Output(0, fmt.Sprintf(verb, v))
		}
		switch err := v.(type) {
		case interface{ Unwrap() error }:
			if next := err.Unwrap(); next != nil {
				c.hear(next)
			}
		case interface{ Unwrap() []error }:
			for _, next := range err.Unwrap() {
				c.hear(next)
			}
		}
	}
}

func (c *confidant) requireNoSecret(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, text := range c.told {
		for _, secret := range []string{secretToken, secretPassword, secretQuery} {
			require.NotContains(t, text, secret)
		}
	}
}

// The secrets are in no line of log, however low its level, in no error, and in nothing that can be asked for, whatever
// becomes of connects and lookups, and however talkative peers are.
func TestNoSecretIsToldWhateverHappens(t *testing.T) {
	skipUnderRace(t, "what is said")
	t.Parallel()
	lookupd := "http://me:" + secretPassword + "@l1:4161/lookup?dc=a&access_token=" + secretQuery
	for name, test := range map[string]struct {
		arrange func(n *fakeNSQD, l *fakeLookupd)
		tune    func(cfg *Config)
		connect string // what the direct connect says
	}{
		"all is well": {arrange: func(*fakeNSQD, *fakeLookupd) {}},
		"nsqd is down": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) { n.down() },
			connect: "refused",
		},
		"nsqd hangs": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) { n.setReach(reachHangs) },
			connect: "deadline",
		},
		"AUTH is refused, and the secret said back": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) {
				n.at("AUTH", fakeStep{err: "E_UNAUTHORIZED AUTH " + secretToken + " is unknown"})
			},
			connect: "E_UNAUTHORIZED",
		},
		"AUTH is not answered": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) { n.at("AUTH", fakeStep{never: true}) },
			connect: "timeout",
		},
		"AUTH is answered with the secret": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) {
				n.at("AUTH", fakeStep{raw: fakeFrame(0, []byte(`{"identity":"`+secretToken+`","identity_url":"http://auth/?secret=`+secretToken+`","permission_count":1}`))})
			},
			connect: "E_AUTH_FIRST", // the fake has not taken it
		},
		"AUTH is answered with nonsense": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) {
				n.at("AUTH", fakeStep{raw: fakeFrame(0, []byte(secretToken))})
			},
			connect: "Error authenticating",
		},
		"SUB is refused, and the secret said back": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) {
				n.at("SUB", fakeStep{err: "E_UNAUTHORIZED " + secretToken + " has no right to SUB"})
			},
			connect: "E_UNAUTHORIZED",
		},
		"SUB is answered with the secret": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) {
				n.at("SUB", fakeStep{raw: fakeFrame(0, []byte("hello "+secretToken))})
			},
			connect: "unexpected answer",
		},
		"the secret is said back later": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) {
				n.set(func(b *fakeBehaviour) {
					b.afterCommand = func(c *fakeConn, line string) {
						if strings.HasPrefix(line, "RDY") {
							c.sendResponse("hello " + secretToken)
							c.sendError("E_INVALID invalid command " + secretToken)
						}
					}
				})
			},
		},
		"TLS with an unknown CA": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) { n.set(func(b *fakeBehaviour) { b.tls = true }) },
			tune:    func(cfg *Config) { cfg.TlsV1 = true },
			connect: "x509",
		},
		"TLS is not offered": {
			arrange: func(*fakeNSQD, *fakeLookupd) {},
			tune:    func(cfg *Config) { cfg.TlsV1 = true },
			connect: "TLS was asked for",
		},
		"a web server": {
			arrange: func(n *fakeNSQD, _ *fakeLookupd) { n.at("IDENTIFY", fakeStep{raw: fakeHTTPAnswer, hangUp: true}) },
			connect: "HTTP",
		},
		"lookupd refuses, and says the secret back": {
			arrange: func(_ *fakeNSQD, l *fakeLookupd) { l.respondWith(403, "no right: Bearer "+secretToken) },
		},
		"lookupd answers 500 with the secret in JSON": {
			arrange: func(_ *fakeNSQD, l *fakeLookupd) { l.respondWith(500, `{"message":"bad token `+secretToken+`"}`) },
		},
		"lookupd answers garbage": {arrange: func(_ *fakeNSQD, l *fakeLookupd) { l.respondWith(200, secretToken) }},
		"lookupd lists the secret": {arrange: func(_ *fakeNSQD, l *fakeLookupd) {
			l.respondWith(200, `{"producers":[{"broadcast_address":"no host: `+secretToken+`","tcp_port":4150}]}`)
		}},
		"lookupd is down": {arrange: func(_ *fakeNSQD, l *fakeLookupd) { l.refused() }},
		"lookupd hangs":   {arrange: func(_ *fakeNSQD, l *fakeLookupd) { l.hangs() }},
		"lookupd redirects to nowhere": {arrange: func(_ *fakeNSQD, l *fakeLookupd) {
			l.redirects("http://gone:4161/lookup?access_token=" + secretQuery)
		}},
	} {
		for _, structured := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, slog %v", name, structured), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					n := newFakeNSQD(t)
					n.set(func(b *fakeBehaviour) { b.authSecret = secretToken })
					lookupds := newFakeLookupds(t, "l1:4161")
					lookupds.at("l1:4161").list("nsqd-1:4150", "other:4150")
					test.arrange(n, lookupds.at("l1:4161"))
					all := &confidant{}
					r := newDiscoveringConsumer(t, n.cluster, lookupds, func(cfg *Config) {
						cfg.AuthSecret = secretToken
						cfg.LookupdPollTimeout, cfg.ReadTimeout = 10*time.Second, 40*time.Second
						if test.tune != nil {
							test.tune(cfg)
						}
					})
					if structured {
						r.log.setSlog(slog.New(slog.NewJSONHandler(all, &slog.HandlerOptions{Level: slog.LevelDebug})))
					} else {
						r.SetLogger(all, LogLevelDebug)
					}
					all.hear(r.config, *r.config, &ConfigFlag{r.config}) // before it runs, since printing takes no locks

					err := r.ConnectToNSQD(n.addr)
					if test.connect == "" {
						require.NoError(t, err)
					} else {
						require.ErrorContains(t, err, test.connect)
					}
					all.hear(err)
					all.hear(r.ConnectToNSQLookupd(lookupd))
					all.hear(r.ConnectToNSQLookupds([]string{lookupd + "\n", "http://l1:x/?token=" + secretQuery, "me:" + secretPassword + "@l1:4161"}))
					all.hear(r.ConnectToNSQD("me:" + secretPassword + "@nsqd:4150"))
					all.hear(r.DisconnectFromNSQLookupd(lookupd))
					n.publishN(2)
					time.Sleep(3 * time.Minute)
					n.dropAll()
					time.Sleep(time.Minute)

					s := r.Status()
					all.hear(s, *r.Stats())
					asJSON, err := json.Marshal(s)
					all.hear(string(asJSON), err)
					for _, row := range s.NSQDs {
						all.hear(row.LastError)
					}
					for _, row := range s.NSQLookupds {
						require.Equal(t, "http://xxxxx@l1:4161/lookup?dc=a&access_token=xxxxx", row.Address)
						all.hear(row.LastError)
					}
					for _, c := range r.conns() {
						all.hear(c.String(), c.RemoteAddr())
					}
					require.Equal(t, "Bearer "+secretToken, lookupds.asked("l1:4161")[0].Header.Get("Authorization"), "it is sent")
					require.Contains(t, lookupds.asked("l1:4161")[0].URL, secretQuery)
					stopConsumer(t, r, time.Minute)
					require.Greater(t, len(all.told), 40)
					all.requireNoSecret(t)
				})
			})
		}
	}
}

// redirects sends whoever asks to another URL.
func (l *fakeLookupd) redirects(to string) {
	l.respond(func(context.Context) (*http.Response, error) {
		resp := fakeHTTP(http.StatusFound, strings.NewReader(""))
		resp.Header.Set("Location", to)
		return resp, nil
	})
}

// A Config may be logged, in any form.
func TestConfigIsPrintedWithoutItsSecret(t *testing.T) {
	cfg := NewConfig()
	cfg.ClientID = "my-id"
	require.Contains(t, fmt.Sprintf("%+v", cfg), "AuthSecret: ", "none is none")
	cfg.AuthSecret = secretToken
	all := &confidant{}
	all.hear(cfg, *cfg, []*Config{cfg}, struct{ C Config }{*cfg}, map[string]any{"cfg": cfg})
	for _, verb := range []string{"%x", "%X", "%t", "%08.3f", "% x", "%-200v"} {
		require.NotContains(t, fmt.Sprintf(verb, cfg), secretToken)
		require.NotContains(t, fmt.Sprintf(verb, cfg), fmt.Sprintf("%x", secretToken))
		require.NotContains(t, fmt.Sprintf(verb, cfg), fmt.Sprintf("%X", secretToken))
	}
	var out bytes.Buffer
	slog.New(slog.NewTextHandler(&out, nil)).Info("config", "config", cfg, "value", *cfg)
	slog.New(slog.NewJSONHandler(&out, nil)).Info("config", "config", cfg, "value", *cfg)
	all.hear(out.String())
	_, err := json.Marshal(map[string]any{"cfg": cfg}) // refused for its funcs; its error must not tell either
	all.hear(err)
	all.requireNoSecret(t)

	require.Contains(t, fmt.Sprintf("%+v", cfg), "ClientID:my-id")
	require.Contains(t, fmt.Sprintf("%+v", cfg), "AuthSecret:xxxxx")
	require.Contains(t, fmt.Sprintf("%#v", cfg), `AuthSecret:"xxxxx"`)
	require.Equal(t, secretToken, cfg.AuthSecret, "printing changes nothing")
	var none *Config
	require.Equal(t, "<nil>", fmt.Sprint(none))
}

// A misspelled option may have had a secret for its value.
func TestOptionErrorsHaveNoSecret(t *testing.T) {
	all := &confidant{}
	cfg := NewConfig()
	for _, name := range []string{"auth_secret", "auth_secert", "auth-secret "} {
		for _, value := range []any{secretToken, []byte(secretToken), errors.New(secretToken), struct{ S string }{secretToken}, &secretHolder{secretToken}} {
			all.hear(cfg.Set(name, value))
		}
	}
	all.hear((&ConfigFlag{cfg}).Set("auth_secert," + secretToken))
	all.requireNoSecret(t)
}

type secretHolder struct{ s string }

func TestShownAddress(t *testing.T) {
	for addr, want := range map[string]string{
		"":                                     "",
		"l1:4161":                              "l1:4161",
		"http://l1:4161":                       "http://l1:4161",
		"http://l1:4161/lookup?dc=a&zone=b":    "http://l1:4161/lookup?dc=a&zone=b",
		"http://u:p@l1:4161/x":                 "http://xxxxx@l1:4161/x",
		"u:p@l1:4161":                          "xxxxx@l1:4161",
		"http://u:p@ss@l1:4161":                "http://xxxxx@l1:4161",
		"http://u:p?s@l1:4161":                 "http://xxxxx@l1:4161",
		"http://u:p/s@l1:4161/?token=x":        "http://xxxxx@l1:4161/?token=xxxxx",
		"http://l1/?token=x":                   "http://l1/?token=xxxxx",
		"http://l1/?dc=a&API-Key=x&b":          "http://l1/?dc=a&API-Key=xxxxx&b",
		"http://l1/?a%75th=x":                  "http://l1/?a%75th=xxxxx",
		"http://l1/?dc=a;secret=x":             "http://l1/?dc=a&secret=xxxxx",
		"http://l1/?sig":                       "http://l1/?sig",
		"http://l1/?token=":                    "http://l1/?token=",
		"http://l1/?token=a=b":                 "http://l1/?token=xxxxx",
		"http://l1/?mail=a@b&password=x&dc=a":  "http://xxxxx@b&password=xxxxx&dc=a",
		"http://l1/?password=a@b":              "http://xxxxx@b",
		"http://l1/?%zz=1&X-Amz-Signature=abc": "http://l1/?%zz=1&X-Amz-Signature=xxxxx",
	} {
		require.Equal(t, want, shownAddress(addr), addr)
	}
	u, err := parseLookupdAddress("http://u:p@l1?dc=a&token=x")
	require.NoError(t, err)
	require.Equal(t, "http://xxxxx@l1/lookup?dc=a&token=xxxxx", lookupdName(u))
	require.Equal(t, "http://u:p@l1/lookup?dc=a&token=x", u.String(), "what is asked has it")
}

// A redirect to another host gets neither the bearer token nor the URL it came from.
func TestRedirectsTakeNoSecretElsewhere(t *testing.T) {
	for to, secret := range map[string]bool{
		"http://l1:4161/other":         true,
		"http://l2:4161/lookup":        false,
		"http://l1:4162/lookup":        false,
		"https://l1:4161/lookup":       false,
		"http://sub.l1:4161/lookup":    false,
		"http://l2:4161/back-to-first": false,
	} {
		t.Run(to, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lookupds := newFakeLookupds(t, "l1:4161", "l2:4161", "l1:4162", "sub.l1:4161")
				first := lookupds.at("l1:4161")
				first.redirects(to)
				r := newDiscoveringConsumer(t, newFakeCluster(t), lookupds, func(cfg *Config) { cfg.AuthSecret = secretToken })
				require.NoError(t, r.ConnectToNSQLookupd("http://me:"+secretPassword+"@l1:4161/lookup?token="+secretQuery))
				asked := lookupds.asked("")
				require.GreaterOrEqual(t, len(asked), 2)
				require.Equal(t, "Bearer "+secretToken, asked[0].Header.Get("Authorization"))
				second := asked[1]
				if secret {
					require.Equal(t, "Bearer "+secretToken, second.Header.Get("Authorization"))
					return
				}
				for key, values := range second.Header {
					for _, value := range slices.Concat([]string{key}, values, []string{second.URL}) {
						for _, s := range []string{secretToken, secretPassword, secretQuery} {
							require.NotContains(t, value, s, key)
						}
					}
				}
			})
		})
	}
}
