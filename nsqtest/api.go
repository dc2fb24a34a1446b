package nsqtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// ErrNotFound is in the error of a call about a topic or channel that the server doesn't have. Use errors.Is.
var ErrNotFound = errors.New("nsqtest: no such topic or channel")

// StatusError is an answer of a server that is not 200. One with status 404 is an [ErrNotFound] too.
type StatusError struct {
	Path    string // for example "/channel/empty"
	Status  int    // HTTP status
	Message string // for example "CHANNEL_NOT_FOUND"
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("nsqtest: %s: %d %s", e.Path, e.Status, e.Message)
}

func (e *StatusError) Is(target error) bool {
	return target == ErrNotFound && e.Status == http.StatusNotFound
}

// requestTimeout bounds each call: a frozen nsqd accepts connections and never answers.
const requestTimeout = 10 * time.Second

// api is the HTTP interface of one nsqd or nsqlookupd.
type api struct {
	addr   string // never changes once the server runs
	client *http.Client
}

func newAPI(addr string) api {
	// A transport of its own, so that disconnect closes nobody else's connections. And no proxy from the environment.
	transport := &http.Transport{MaxIdleConnsPerHost: 4}
	return api{addr: addr, client: &http.Client{Transport: transport, Timeout: requestTimeout}}
}

// disconnect is due whenever the server has stopped.
func (a api) disconnect() { a.client.CloseIdleConnections() }

// ping waits until the server answers. The listener is there by now, so there is nothing to retry.
func (a api) ping() error { return a.get("/ping", nil, nil) }

func (a api) get(path string, query url.Values, result any) error {
	return a.call(http.MethodGet, path, query, nil, result)
}

func (a api) post(path string, query url.Values, body []byte) error {
	return a.call(http.MethodPost, path, query, body, nil)
}

func (a api) call(method, path string, query url.Values, body []byte, result any) error {
	u := url.URL{Scheme: "http", Host: a.addr, Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequest(method, u.String(), bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("nsqtest: %w", err)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return fmt.Errorf("nsqtest: %w", err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return fmt.Errorf("nsqtest: %s: %w", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return &StatusError{Path: path, Status: resp.StatusCode, Message: errorMessage(data)}
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(data, result); err != nil {
		return fmt.Errorf("nsqtest: %s: %w", path, err)
	}
	return nil
}

// errorMessage takes the text out of {"message":"TOPIC_NOT_FOUND"}.
func errorMessage(data []byte) string {
	var answer struct{ Message string }
	if json.Unmarshal(data, &answer) != nil {
		return string(data)
	}
	return answer.Message
}

func topicQuery(topic string) url.Values {
	return url.Values{"topic": {topic}}
}

func channelQuery(topic, channel string) url.Values {
	return url.Values{"topic": {topic}, "channel": {channel}}
}
